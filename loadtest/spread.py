"""Load generators on the nodes of a Ray cluster: one process rarely holds more than a few thousand streams.

Each generator gets every n-th call with its planned time, and its part of the lanes. They start at one moment of the
wall clock, so the nodes' clocks must agree to within a few milliseconds (as NTP keeps them); latencies are differences
on one node and do not depend on that.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from loadtest.client import Client, Endpoint
from loadtest.guard import Guard
from loadtest.loop import Call, Run, drive
from outrider.errors import InvalidArgument, OutriderError

_START_AFTER_S = 3.0
"""From sending the tasks to the first call: workers have to start and import."""


class Share(NamedTuple):
    """What one generator does."""

    calls: list[Call]
    max_concurrency: int | None


class Report(NamedTuple):
    """What one generator found: its run, and why it stopped early, if it did."""

    run: Run
    verdict: str | None


def split(calls: Sequence[Call], generators: int, max_concurrency: int | None) -> list[Share]:
    """Every n-th call for each of n generators, and lanes that add up to `max_concurrency`.

    Raises:
        InvalidArgument: fewer lanes or calls than generators.
    """
    if not 1 <= generators <= len(calls):
        raise InvalidArgument("generators", f"must be from 1 to the number of requests, {len(calls)}, got {generators}")
    if max_concurrency is not None and max_concurrency < generators:
        raise InvalidArgument("generators", f"{generators} cannot share {max_concurrency} lanes")
    return [
        Share(
            list(calls[index::generators]),
            None if max_concurrency is None else max_concurrency // generators + (index < max_concurrency % generators),
        )
        for index in range(generators)
    ]


def join(reports: Sequence[Report]) -> tuple[Run, str | None]:
    """All outcomes, the length of the longest run, and the first reason to have stopped."""
    outcomes = sorted((one for report in reports for one in report.run.outcomes), key=lambda one: one.end_s)
    verdict = next((report.verdict for report in reports if report.verdict), None)
    return Run(outcomes, max(report.run.seconds for report in reports)), verdict


def generate(endpoint: Endpoint, share: Share, max_error_rate: float, start_at_s: float) -> Report:
    """One generator's work, from `start_at_s` on the wall clock; runs in a process of its own."""

    async def run() -> Report:
        guard = Guard(max_error_rate)
        async with Client(endpoint, connections=share.max_concurrency or len(share.calls)) as client:
            late_s = time.time() - start_at_s
            if late_s > 0:
                raise OutriderError(f"a load generator started {late_s:.1f} s too late; its node is too busy")
            await asyncio.sleep(-late_s)
            found = await drive(client, share.calls, guard, max_concurrency=share.max_concurrency)
        return Report(found, guard.verdict)

    return asyncio.run(run())


def on_cluster(
    address: str, endpoint: Endpoint, shares: Sequence[Share], max_error_rate: float
) -> tuple[Run, str | None]:
    """Run the shares as Ray tasks, spread over the nodes.

    Raises:
        OutriderError: Ray is not installed, or a generator failed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise OutriderError("--ray-address needs ray: pip install 'outrider[coordinator]'") from None
    ray.init(address=address, configure_logging=False, log_to_driver=False)
    try:
        task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy="SPREAD")(generate)
        ready: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(_ready)
        ray.get([ready.remote() for _ in shares])
        start_at_s = time.time() + _START_AFTER_S
        reports = ray.get([task.remote(endpoint, share, max_error_rate, start_at_s) for share in shares])
    except ray.exceptions.RayError as error:
        raise OutriderError(f"a load generator failed: {str(error).strip().splitlines()[-1]}") from None
    finally:
        ray.shutdown()
    return join(reports)


def _ready() -> None:
    """Brings a worker up, with this module imported, before the clock starts."""
