"""`outrider bench compare`: several servers side by side, on the same questions at the same times."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadtest import bootstrap
from loadtest.client import Client, Endpoint, base
from loadtest.guard import Guard
from loadtest.loop import Run, drive
from loadtest.outcome import Outcome
from loadtest.prompts import Prompt, PromptPool
from loadtest.series import refuse_busy
from loadtest.summary import summarise
from loadtest.workload import Load, Sampling, calls
from outrider.errors import InvalidArgument, OutriderError

_SAME_LENGTH = 0.01
"""Arms whose answers differ in length by more than this share did not do the same work."""


@dataclass(slots=True)
class Arm:
    """One server, or one way to ask a server.

    Attributes:
        url: of the server; two arms may share it and differ in `fields`.
        fields: of every request body of this arm.
        endpoint: None where the server could not be found.
        refusal: why it has no figures, in the server's words; the comparison goes on without it.
    """

    name: str
    url: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    endpoint: Endpoint | None = None
    refusal: str | None = None
    runs: list[Run] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """How arms are compared.

    Attributes:
        rounds: every arm runs once in each, in random order.
        load: of one arm in one round.
    """

    baseline: str
    load: Load
    sampling: Sampling
    rounds: int = 5
    max_error_rate: float = 0.05
    allow_busy: bool = False
    seed: int = 0
    goodput_ms: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InvalidArgument("rounds", f"must be at least 1, got {self.rounds}")


async def compare(
    arms: Sequence[Arm],
    pool: PromptPool,
    options: CompareOptions,
    *,
    on_end: Callable[[Outcome], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run all arms in interleaved rounds.

    The first round is a warm-up of one request in twenty; it counts nowhere.

    Raises:
        InvalidArgument: the baseline is no arm, or two arms have one name.
    """
    names = [arm.name for arm in arms]
    if options.baseline not in names or len(set(names)) != len(names):
        raise InvalidArgument("baseline", f"must be one of the arms, each named once: {', '.join(names)}")
    shuffle = random.Random(options.seed)
    # A server that answers two arms gets every text once; different servers get exactly the same texts.
    pools = {base(arm.url): PromptPool(pool.source, seed=options.seed) for arm in arms}
    lanes = options.load.lanes
    async with AsyncExitStack() as stack:
        clients = {}
        for arm in arms:
            if arm.endpoint is not None and arm.refusal is None:
                most = lanes or options.load.num_prompts
                clients[arm.name] = await stack.enter_async_context(Client(arm.endpoint, connections=most))
                await _check(arm, clients[arm.name], options, warn)
        for number in range(-1, options.rounds):
            planned = options.load.plan(np.random.default_rng([options.seed, max(number, 0)]))
            count = options.load.num_prompts if planned is None else len(planned)
            if number < 0:
                planned, count = None, max(1, count // 20)
            prompts = pool.take(count)
            for arm in shuffle.sample(list(arms), len(arms)):
                if arm.refusal is not None or arm.endpoint is None:
                    continue
                guard = Guard(options.max_error_rate)
                sampling = Sampling(**_fields(options.sampling) | {"extra": {**options.sampling.extra, **arm.fields}})
                texts: list[Prompt] = pools[base(arm.url)].fresh(prompts)
                wanted = calls(arm.endpoint, texts, sampling, planned)
                width = lanes if number >= 0 else (lanes or 1)
                run = await drive(clients[arm.name], wanted, guard, max_concurrency=width, on_end=on_end)
                if guard.verdict or all(outcome.failure for outcome in run.outcomes):
                    arm.refusal = guard.verdict or run.outcomes[-1].detail
                    warn(f"{arm.name}: {arm.refusal}")
                elif number >= 0:
                    arm.runs.append(run)
    return result(arms, options)


async def _check(arm: Arm, client: Client, options: CompareOptions, warn: Callable[[str], None]) -> None:
    if options.allow_busy:
        return
    try:
        note = await refuse_busy(client)
    except OutriderError as error:
        arm.refusal = str(error)
        return
    if note:
        warn(f"{arm.name}: {note}")


def result(arms: Sequence[Arm], options: CompareOptions) -> dict[str, Any]:
    """Figures of each arm, and its ratios to the baseline with 95 % intervals over rounds."""
    rng = np.random.default_rng(options.seed)
    reference = next(arm for arm in arms if arm.name == options.baseline)
    found: dict[str, Any] = {}
    for arm in arms:
        if arm.refusal is not None:
            found[arm.name] = {"url": arm.url, "refused": arm.refusal}
            continue
        together = Run([one for run in arm.runs for one in run.outcomes], sum(run.seconds for run in arm.runs))
        figures = summarise(together, planned=len(together.outcomes), goodput_ms=options.goodput_ms)
        found[arm.name] = {"url": arm.url, **figures}
        if arm is reference or reference.refusal is not None:
            continue
        theirs = [_throughput(run) for run in reference.runs]
        own = [_throughput(run) for run in arm.runs]
        low, high = bootstrap.interval(bootstrap.ratio_draws([[x] for x in own], [[x] for x in theirs], rng))
        found[arm.name] |= {
            "ratio_to_baseline": round(sum(own) / sum(theirs), 4),
            "ratio_ci": [round(low, 4), round(high, 4)],
            "ratios_by_round": [round(mine / other, 4) for mine, other in zip(own, theirs, strict=True)],
        }
    written = {name: one["total_output_tokens"] for name, one in found.items() if "refused" not in one}
    same = not written or max(written.values()) <= (1 + _SAME_LENGTH) * min(written.values())
    return {
        "baseline": options.baseline,
        "rounds": options.rounds,
        "prompts_per_round": options.load.num_prompts,
        "same_output_lengths": same,
        "arms": found,
    }


def _throughput(run: Run) -> float:
    return sum(outcome.output_tokens for outcome in run.outcomes if outcome.failure is None) / run.seconds


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__}
