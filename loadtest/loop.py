"""Sends requests: at planned times (open loop), or one after the other in a number of lanes (closed loop)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from loadtest.client import Client, stopwatch
from loadtest.guard import Guard
from loadtest.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Call:
    """One request: its body, and when it is to be sent (None: as soon as a lane is free)."""

    body: Mapping[str, Any]
    task: str
    planned_s: float | None = None


class Run(NamedTuple):
    """What a run gave: outcomes in order of their end, and its length in seconds."""

    outcomes: list[Outcome]
    seconds: float


async def drive(
    client: Client,
    calls: Sequence[Call],
    guard: Guard,
    *,
    max_concurrency: int | None,
    on_end: Callable[[Outcome], None] = lambda _: None,
) -> Run:
    """Send all calls; ends early when the guard says so.

    A call with a planned time never waits for another one to be planned: where `max_concurrency` holds it back, the
    wait is part of its latency.
    """
    clock = stopwatch()
    lanes = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    outcomes: list[Outcome] = []

    async def send(call: Call, planned_s: float, *, holds_lane: bool) -> None:
        if lanes and not holds_lane:
            await lanes.acquire()
        try:
            outcome = await client.send(call.body, task=call.task, planned_s=planned_s, clock=clock)
        finally:
            if lanes:
                lanes.release()
        outcomes.append(outcome)
        guard.count(outcome)
        on_end(outcome)

    async def schedule() -> None:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                if call.planned_s is None:
                    if lanes:
                        await lanes.acquire()
                    group.create_task(send(call, clock(), holds_lane=lanes is not None))
                else:
                    await asyncio.sleep(max(0.0, call.planned_s - clock()))
                    group.create_task(send(call, call.planned_s, holds_lane=False))

    work = asyncio.create_task(schedule())
    stop = asyncio.create_task(guard.stopped.wait())
    try:
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
        if not work.done():
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
    if not work.cancelled():
        work.result()
    return Run(outcomes, clock())
