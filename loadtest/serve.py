"""`outrider bench serve`: one load against one server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.client import Client, Endpoint
from loadtest.guard import Guard
from loadtest.loop import drive
from loadtest.outcome import Outcome
from loadtest.prompts import PromptPool
from loadtest.series import refuse_busy
from loadtest.spread import on_cluster, split
from loadtest.summary import summarise
from loadtest.workload import Load, Sampling, calls, warm_up
from outrider.errors import Unavailable

_LEAST_ACHIEVED = 0.98
"""A generator that sends fewer than this share of the planned rate measures itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What a run does beside its load.

    Attributes:
        warmups: requests before the measurement; they count nowhere.
        goodput_ms: limits by metric.
        ray_address: cluster whose nodes send the load, as `generators` tasks; None sends it from this process.
    """

    load: Load
    sampling: Sampling
    warmups: int = 4
    goodput_ms: Mapping[str, float] | None = None
    max_error_rate: float = 0.05
    allow_busy: bool = False
    seed: int = 0
    ray_address: str | None = None
    generators: int = 1


async def serve(
    endpoint: Endpoint,
    pool: PromptPool,
    options: ServeOptions,
    *,
    on_end: Callable[[Outcome], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the load; the result has the keys of `vllm bench serve`.

    Raises:
        Unavailable: the server answers others, or fails during the warm-up.
    """
    load, sampling = options.load, options.sampling
    planned = load.plan(np.random.default_rng(options.seed))
    count = load.num_prompts if planned is None else len(planned)
    lanes = load.lanes
    async with Client(endpoint, connections=min(lanes or count, count)) as client:
        notes = []
        if not options.allow_busy and (note := await refuse_busy(client)):
            notes.append(note)
        if options.warmups:
            guard = Guard(options.max_error_rate)
            await drive(client, warm_up(endpoint, pool, sampling, options.warmups), guard, max_concurrency=lanes or 1)
            if guard.failures:
                raise Unavailable(f"the warm-up failed ({', '.join(guard.failures)}): {guard.last_detail}")
        prompts = pool.fresh(pool.take(count))
        guard = Guard(options.max_error_rate)
        began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        wanted = calls(endpoint, prompts, sampling, planned)
        if options.ray_address is not None:
            shares = split(wanted, options.generators, lanes)
            arguments = (options.ray_address, endpoint, shares, options.max_error_rate)
            run, stopped = await asyncio.to_thread(on_cluster, *arguments)
            for outcome in run.outcomes:
                on_end(outcome)
        else:
            run = await drive(client, wanted, guard, max_concurrency=lanes, on_end=on_end)
            stopped = guard.verdict
    achieved = achieved_rate([outcome.sent_s for outcome in run.outcomes]) if planned else None
    if load.request_rate and achieved is not None and load.request_rate < float("inf") and lanes is None:
        offered = achieved_rate([entry.at_s for entry in planned or ()])
        if offered and achieved < _LEAST_ACHIEVED * offered and stopped is None:
            notes.append(
                f"sent {achieved:.1f} requests/s instead of {offered:.1f}: this machine is too slow or too busy"
            )
    figures = summarise(run, planned=count, goodput_ms=options.goodput_ms)
    if figures["answers_arrive_whole"]:
        notes.append("answers arrive whole: something in between collects them, so TPOT and ITL are not reported")
    if stopped:
        notes.append(stopped)
    for note in notes:
        warn(note)
    return {
        "date": began,
        "backend": f"openai-{endpoint.door}",
        "model_id": endpoint.model,
        "dataset": pool.source.name,
        "numbered_prompts": pool.numbered,
        "request_rate": "trace" if load.trace else load.request_rate if load.request_rate != float("inf") else "inf",
        "achieved_rate": None if achieved is None else round(achieved, 3),
        "burstiness": load.burstiness if load.arrival == "poisson" else None,
        "max_concurrency": lanes,
        **figures,
        "stopped": stopped,
        "notes": notes,
    }


def achieved_rate(times: list[float]) -> float | None:
    """Requests per second between the first and the last one; None for fewer than two."""
    span = max(times) - min(times) if len(times) > 1 else 0.0
    return (len(times) - 1) / span if span > 0 else None
