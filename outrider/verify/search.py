"""The opening on which the test of the law sees most: drafted tokens are often rejected and often accepted, and few
outcomes are likely.

Whatever goes wrong in accepting and rejecting moves chances between what is accepted and what is drawn in its place, by
about (rejected share) x (accepted share), and chi-square grows with the square of that. The cells that the outcomes
spread over add noise as the square root of their number, which is about 1 / (the chance that two samples agree).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from outrider.verify.door import Door, Reply, Wish

GAMMA = 2
"""Slots of a round: tokens 2 and 3, so that the third is tested behind an accepted second."""
MAX_TOKENS = GAMMA + 2
"""The first token is plain, and the round emits up to GAMMA + 1."""
_PRIOR = 1 / 32
"""Added to the chance that two samples agree, which few samples tell badly."""
_FINALISTS = 4
_MORE = 6
"""Times as many samples, of the openings that the first ones speak for."""


class Opening(NamedTuple):
    """A prompt for the law.

    Attributes:
        drafted: drafted tokens per sample.
        rejected: those of them that did not become part of it.
        agree: chance that two samples begin with the same two tokens.
    """

    prompt: str
    drafted: float
    rejected: float
    agree: float

    @property
    def score(self) -> float:
        accepted = self.drafted - self.rejected
        moved = self.rejected * accepted / self.drafted if self.drafted else 0.0
        return moved**2 * math.sqrt(self.agree + _PRIOR)


def wish(prompt: str, *, speculate: bool, n: int, gamma: int = GAMMA) -> Wish:
    """Samples of the law at temperature 1."""
    return Wish(
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=1.0,
        gamma=min(gamma, GAMMA) if speculate else 0,
        n=n,
        ends=False,
    )


async def best(door: Door, openings: Sequence[str], *, n: int, gamma: int) -> Opening:
    """Samples each opening `n` times, those with the highest scores again, and takes the best of these."""

    async def sampled(prompts: Sequence[str], times: int) -> list[Opening]:
        asked = [wish(prompt, speculate=True, n=n, gamma=gamma) for prompt in prompts for _ in range(times)]
        replies = await door.all(asked)
        found = [judge(prompt, replies[index * times : (index + 1) * times]) for index, prompt in enumerate(prompts)]
        return sorted(found, key=lambda opening: (opening.score, opening.drafted), reverse=True)

    first = await sampled(openings, 1)
    return (await sampled([opening.prompt for opening in first[:_FINALISTS]], _MORE))[0]


def samples(openings: int, n: int) -> int:
    """How many `best` takes."""
    return openings * n + min(openings, _FINALISTS) * _MORE * n


def judge(prompt: str, replies: Sequence[Reply]) -> Opening:
    """What an opening's samples say of it."""
    texts = [text for reply in replies for text in reply.texts]
    drafted, accepted = sum(reply.drafted for reply in replies), sum(reply.accepted for reply in replies)
    n = len(texts)
    counts = Counter(text[:2] for text in texts).values()
    return Opening(
        prompt,
        drafted=drafted / n,
        rejected=(drafted - accepted) / n,
        agree=sum(count * (count - 1) for count in counts) / max(n * (n - 1), 1),
    )
