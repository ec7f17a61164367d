"""The whole check of one deployment, in order: texts, near ties, the search for a prompt, the law."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from outrider.errors import InvalidArgument
from outrider.verify import law, noise, search, texts
from outrider.verify.door import CannotJudge, Deployment, Door, Wish
from outrider.verify.prompts import OPENINGS, TEXTS
from outrider.verify.report import Report
from outrider.verify.texts import Difference

SAMPLES = 8_000
_GAMMAS = (4, 2, 1)
"""Drafted tokens per round, the first that the server allows; fixed, so that a controller cannot choose 0."""
_COUPLED_N = 2
_PROGRESS_S = 10.0

Say = Callable[[str], None]


async def verify(
    door: Door, *, samples: int, say: Say, prompts: Sequence[str] = TEXTS, openings: Sequence[str] = OPENINGS
) -> Report:
    """Checks what the door leads to.

    Args:
        samples: of the law, with and without speculation each.
        say: told what happens, and how long it will take.
        prompts: of the texts that are compared id by id.
        openings: prompts that the law may be sampled on.

    Raises:
        CannotJudge: no draft, overloaded, unreachable, or the server refuses what is asked.
    """
    try:
        return await _verify(door, samples, say, prompts, openings)
    except InvalidArgument as error:
        raise CannotJudge(str(error)) from None


async def _verify(door: Door, samples: int, say: Say, prompts: Sequence[str], openings: Sequence[str]) -> Report:
    deployment = await door.deployment()
    gamma = await _gamma(door)
    say(f"target {deployment.target} ({deployment.dtype}), draft {deployment.draft}, {gamma} drafted tokens per round")
    say(f"at most {deployment.places} answers at once, and none while others wait")
    greedy = await texts.equality(door, texts.greedy(prompts), gamma)
    coupled = await texts.equality(door, texts.coupled(prompts, min(_COUPLED_N, deployment.n)), gamma)
    say(f"equal texts: {greedy.equal} of {greedy.compared} greedy, {coupled.equal} of {coupled.compared} coupled")
    near_ties = await _near_ties(door, deployment, [*greedy.differences, *coupled.differences], prompts, say)
    began_s = time.monotonic()
    opening = await search.best(door, openings, n=deployment.n, gamma=gamma)
    per_sample_s = (time.monotonic() - began_s) / search.samples(len(openings), deployment.n)
    rejected = f"{opening.rejected:.2f} of {opening.drafted:.2f}"
    say(f"opening {opening.prompt!r}: {rejected} drafted tokens of a sample are rejected")
    if not opening.drafted and near_ties == len(greedy.differences) + len(coupled.differences):
        raise CannotJudge(f"nothing was drafted behind any of {len(openings)} openings")
    say(f"{samples:,} samples with and without speculation, in about {_minutes(2 * samples * per_sample_s)}")
    plain, speculative, drafted = await _sample(door, opening.prompt, samples, deployment.n, gamma, say)
    return Report(
        greedy=greedy,
        coupled=coupled,
        near_ties=near_ties,
        law=law.compare(plain, speculative),
        law_drafted=drafted,
        dtype=deployment.dtype,
    )


async def _near_ties(
    door: Door, deployment: Deployment, differences: Sequence[Difference], prompts: Sequence[str], say: Say
) -> int:
    """How many differences rounding explains; none where the target found that its rows do not depend on the batch."""
    if deployment.invariant:
        for difference in differences:
            say(f"prompt {difference.wish.prompt!r} differs at token {difference.token}")
        return 0
    say(f"the target's rows depend on their batch ({deployment.note}); measuring by how much")
    band = await noise.band(door, prompts, deployment.n)
    ties = [await noise.look(door, difference) for difference in differences]
    for tie in ties:
        verdict = "a near tie" if tie.within(band) else "not explained"
        lead = "unknown" if tie.lead is None else f"{tie.lead:.2e}"
        say(f"prompt {tie.difference.wish.prompt!r} differs at token {tie.difference.token}: lead {lead}, {verdict}")
    say(f"noise band {band:.2e}: {sum(tie.within(band) for tie in ties)} of {len(ties)} differences are near ties")
    return sum(tie.within(band) for tie in ties)


async def _gamma(door: Door) -> int:
    """The largest usable number of drafted tokens that the server allows.

    Raises:
        InvalidArgument: it allows none, or refuses the request for another reason.
    """
    for gamma in _GAMMAS:
        try:
            await door.ask(Wish(prompt=TEXTS[0], max_tokens=1, temperature=0.0, gamma=gamma))
        except InvalidArgument as error:
            if error.field != "num_speculative_tokens" or gamma == _GAMMAS[-1]:
                raise
        else:
            return gamma
    raise AssertionError("the last one is refused with an error")


async def _sample(
    door: Door, prompt: str, samples: int, n: int, gamma: int, say: Say
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
    """Samples without and with speculation, in turn so that a change of the machine meets both; and tokens drafted."""
    requests = math.ceil(samples / n)
    pair = [search.wish(prompt, speculate=speculate, n=n, gamma=gamma) for speculate in (False, True)]
    began_s = said_s = time.monotonic()

    def arrived(answers: int) -> None:
        nonlocal said_s
        now_s = time.monotonic()
        if now_s - said_s > _PROGRESS_S:
            said_s = now_s
            left_s = (now_s - began_s) * (2 * requests * n / answers - 1)
            say(f"{answers:,} of {2 * requests * n:,} samples, about {_minutes(left_s)} left")

    replies = await door.all(pair * requests, arrived)
    plain = [text for reply in replies[0::2] for text in reply.texts]
    speculative = [text for reply in replies[1::2] for text in reply.texts]
    return plain, speculative, sum(reply.drafted for reply in replies[1::2])


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
