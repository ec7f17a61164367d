"""The kinds of fault: what is done, and what clients may see of it (architecture: the table of failures)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import httpx
import psutil

from tests.chaos.load import BARE, CUT, DEADLINE_S, OK, REFUSED, UNAVAILABLE, UNREACHABLE, Load
from tests.chaos.site import MAX_NUM_SEQS, Part, Site
from tests.chaos.wire import Wire

QUEUE_FACTOR = 4
"""The coordinator's own: so many times as many as are decoded may wait."""


class Stage(NamedTuple):
    """What a fault has to work with."""

    site: Site
    load: Load
    dice: random.Random


class Kind(NamedTuple):
    """One kind of fault.

    Attributes:
        inject: does it, and returns when whatever was taken away is there again.
        excuses: ends of an attempt that the fault explains.
        spares_running: whether what ran when it began must end well all the same.
        recovers_s: within which all parts are attached again.
        drafts: whether recovery includes that tokens are drafted again.
    """

    inject: Callable[[Stage], Awaitable[None]]
    excuses: frozenset[str] = frozenset()
    spares_running: bool = True
    recovers_s: float = 15.0
    drafts: bool = False


async def _kill(part: Part, stage: Stage) -> None:
    part.wanted = False
    part.send(signal.SIGKILL)
    await asyncio.sleep(stage.dice.uniform(0.3, 1.5))
    part.wanted = True
    await stage.site.until(part.serves, f"the {part.role} serves again")


async def _restart(part: Part, stage: Stage) -> None:
    starts = part.starts
    part.send(signal.SIGTERM)

    async def is_back() -> bool:
        return part.starts > starts and await part.serves()

    await stage.site.until(is_back, f"the {part.role} serves again")


async def _pause(processes: list[psutil.Process], stage: Stage) -> None:
    for process in processes:
        process.suspend()
    try:
        await asyncio.sleep(stage.dice.uniform(1.0, 4.0))
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


async def _crash_loop(part: Part, stage: Stage) -> None:
    for _ in range(4):
        part.send(signal.SIGKILL)
        await asyncio.sleep(stage.dice.uniform(0.6, 2.5))
    await stage.site.until(part.serves, f"the {part.role} serves again")


async def _slow(wire: Wire, stage: Stage) -> None:
    wire.delay_s = stage.dice.choice((0.02, 0.1, 0.4))
    await asyncio.sleep(stage.dice.uniform(2.0, 4.0))
    wire.mend()


async def _lose(wire: Wire, stage: Stage) -> None:
    wire.spoil(lost=stage.dice.choice((0.02, 0.2)), seed=stage.dice.randrange(1 << 30))
    await asyncio.sleep(stage.dice.uniform(2.0, 4.0))
    wire.mend()


async def _double(wire: Wire, stage: Stage) -> None:
    wire.spoil(doubled=stage.dice.choice((0.2, 1.0)), seed=stage.dice.randrange(1 << 30))
    await asyncio.sleep(stage.dice.uniform(2.0, 4.0))
    wire.mend()


async def _cut(wire: Wire, stage: Stage) -> None:
    for _ in range(3):
        wire.cut()
        await asyncio.sleep(stage.dice.uniform(0.05, 0.8))


async def _never_started(stage: Stage) -> None:
    """A coordinator that has never seen the draft; then the draft comes."""
    site = stage.site
    site.draft.wanted = False
    site.draft.send(signal.SIGKILL)
    await _coordinator_restart(stage)

    async def serves_without() -> bool:
        status, body = await site.ready()
        return status == 200 and [one["part"] for one in body["degraded"]] == ["draft"]

    await site.until(serves_without, "/ready is 200 and names the draft")
    await asyncio.sleep(1.0)
    site.draft.wanted = True
    await site.until(site.draft.serves, "the draft serves")


async def _coordinator_kill(stage: Stage) -> None:
    family = stage.site.coordinator.family()
    stage.site.coordinator.send(signal.SIGKILL)
    await _coordinator_is_back(stage, family)


async def _coordinator_restart(stage: Stage) -> None:
    family = stage.site.coordinator.family()
    stage.site.coordinator.send(signal.SIGTERM)
    await _coordinator_is_back(stage, family)


async def _coordinator_is_back(stage: Stage, before: list[psutil.Process]) -> None:
    """All processes of the one before are gone (they answer for a moment after a kill), and another one answers."""

    async def is_back() -> bool:
        return not any(map(_is_alive, before)) and (await stage.site.ready())[0] != 0

    await stage.site.until(is_back, "the coordinator answers again")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def _ray(stage: Stage, word: str, *, restarts: bool) -> None:
    """Kills one of Ray's processes; `restarts`: the coordinator ends with it, and is started again."""
    family, processes = stage.site.coordinator.family(), stage.site.coordinator.relatives(word)
    assert processes, f"there is no {word} below the coordinator"
    for process in processes:
        process.kill()
    if restarts:
        await _coordinator_is_back(stage, family)
    else:
        # Whoever looks too early sees the state of before.
        await asyncio.sleep(0.5)


async def _full_queue(stage: Stage) -> None:
    """More than may run and wait: the excess is told so at once, the others are answered."""
    began_s = time.monotonic()
    attempts = await stage.load.burst(MAX_NUM_SEQS * (1 + QUEUE_FACTOR) + 20)
    refused = [one for one in attempts if one.end == REFUSED]
    assert refused, "nothing was refused"
    slowest_s = max(one.ended_s - one.began_s for one in refused)
    assert slowest_s < max(5.0, (time.monotonic() - began_s) / 2), f"a refusal took {slowest_s:.1f} s"
    others = [one for one in attempts if one.end not in (REFUSED, OK)]
    assert not others, others


async def _clients_gone(stage: Stage) -> None:
    """Clients that hang up, some before the first token, some behind it."""

    async def hang_up(index: int) -> None:
        body = {**stage.dice.choice(stage.load.asked).body, "stream": index % 2 == 0, "max_tokens": 1_500}
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(stage.dice.uniform(0.05, 1.5)):
                url = f"{stage.site.url()}/v1/completions"
                async with stage.load.http.stream("POST", url, json=body, timeout=DEADLINE_S) as response:
                    async for _ in response.aiter_bytes():
                        pass

    await asyncio.gather(*(hang_up(index) for index in range(6)))


_AWAY = frozenset({UNAVAILABLE})
_GONE = frozenset({UNAVAILABLE, UNREACHABLE, CUT, BARE})
_RESTART_S = 90.0
"""A coordinator with a Ray of its own takes long to start on a loaded machine."""

KINDS: dict[str, Kind] = {
    "draft killed": Kind(lambda s: _kill(s.site.draft, s), drafts=True),
    "draft stopped": Kind(lambda s: _pause(s.site.draft.family(), s), drafts=True),
    "draft restarted": Kind(lambda s: _restart(s.site.draft, s), drafts=True),
    "draft crash-looping": Kind(lambda s: _crash_loop(s.site.draft, s), drafts=True),
    "draft never started": Kind(_never_started, _GONE, recovers_s=_RESTART_S, drafts=True),
    "draft link slow": Kind(lambda s: _slow(s.site.draft_wire, s), drafts=True),
    "draft messages lost": Kind(lambda s: _lose(s.site.draft_wire, s), drafts=True),
    "draft messages doubled": Kind(lambda s: _double(s.site.draft_wire, s), drafts=True),
    "draft link cut": Kind(lambda s: _cut(s.site.draft_wire, s), drafts=True),
    "target killed": Kind(lambda s: _kill(s.site.target, s), _AWAY),
    "target stopped": Kind(lambda s: _pause(s.site.target.family(), s), _AWAY),
    "target restarted": Kind(lambda s: _restart(s.site.target, s), _AWAY),
    "target link slow": Kind(lambda s: _slow(s.site.target_wire, s)),
    "target messages lost": Kind(lambda s: _lose(s.site.target_wire, s)),
    "target messages doubled": Kind(lambda s: _double(s.site.target_wire, s)),
    "target link cut": Kind(lambda s: _cut(s.site.target_wire, s)),
    "coordinator killed": Kind(_coordinator_kill, _GONE, spares_running=False, recovers_s=_RESTART_S),
    "coordinator stopped": Kind(lambda s: _pause(s.site.coordinator.relatives("ServeReplica"), s)),
    "coordinator restarted": Kind(_coordinator_restart, _GONE, recovers_s=_RESTART_S),
    "Ray worker (replica) killed": Kind(
        lambda s: _ray(s, "ServeReplica", restarts=False), _GONE, spares_running=False, recovers_s=_RESTART_S
    ),
    "Ray worker (controller) killed": Kind(lambda s: _ray(s, "ServeController", restarts=False), recovers_s=_RESTART_S),
    "Ray raylet killed": Kind(
        lambda s: _ray(s, "raylet", restarts=True), _GONE, spares_running=False, recovers_s=_RESTART_S
    ),
    "Ray head killed": Kind(lambda s: _ray(s, "gcs_server", restarts=True), _GONE, recovers_s=_RESTART_S),
    "queues full": Kind(_full_queue, frozenset({REFUSED})),
    "clients gone": Kind(_clients_gone),
}
