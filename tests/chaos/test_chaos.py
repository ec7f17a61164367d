"""A stack of real processes under load while its parts fail, by name, for a while, or in turn for an update."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.load import OK, Load, answered_alone, questions
from tests.chaos.run import DRAFTED, Plan, chosen, pair, run_all
from tests.chaos.site import Part, Site, site

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(6 * 3600)]

BACK_WITHIN_S = 5.0
"""A draft is taken up so soon after its health says that it serves."""
_CLIENTS = 5


async def _load(made: Site, tokens: tuple[int, int], urls: list[str]) -> Load:
    asked = await answered_alone(made.http, made.url(), questions(8, 3, tokens))
    load = Load(made.http, lambda: urls, asked)
    load.start(_CLIENTS)
    return load


def _failed(load: Load) -> list[str]:
    return [f"{one.end}: {one.detail[:300]}" for one in load.attempts if one.end != OK]


async def test_faults_one_at_a_time(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Guards texts, deadlines and memory against whatever part fails, and requests that should survive it."""
    option = pytestconfig.getoption
    plan = Plan(option("--chaos-requests"), option("--chaos-times"), chosen(option("--chaos-kinds")), option("--seed"))
    assert await run_all([option("--chaos-pair")], plan, tmp_path)


async def test_a_draft_that_is_away_costs_speed_and_nothing_else(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Guards against an outage, and against a draft that is found again late or never."""
    made = pair(pytestconfig.getoption("--chaos-pair"), tmp_path / "models")
    async with site(tmp_path, made.target, made.draft) as stack:
        load = await _load(stack, made.tokens, [stack.url()])
        await stack.until(lambda: _drafts_more(stack, 0.0), "tokens are drafted")
        stack.draft.wanted = False
        stack.draft.send(signal.SIGKILL)
        gone_s, states = time.monotonic(), list[tuple[int, list[str]]]()
        while time.monotonic() - gone_s < pytestconfig.getoption("--draft-away-s"):
            status, body = await stack.ready()
            states.append((status, [f"{one['part']}: {one['reason']}" for one in body["degraded"]]))
            await asyncio.sleep(0.25)
        drafted = await stack.series(DRAFTED)
        stack.draft.wanted = True
        await stack.until(stack.draft.serves, "the draft serves again")
        back_s = await stack.until(lambda: _drafts_more(stack, drafted), "tokens are drafted again", 60.0)
        await load.stop()
        assert {status for status, _ in states} == {200}
        named = [reasons for _, reasons in states[8:]]
        assert named and all(any(reason.startswith("draft: ") for reason in reasons) for reasons in named)
        assert not _failed(load)
        assert load.finished > _CLIENTS
        print(f"\n{load.finished} answers right; drafting {back_s:.1f} s after the draft's return; /ready: {named[-1]}")
        assert back_s < BACK_WITHIN_S


async def test_a_rolling_restart_fails_nobody(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Guards an update under load: two targets, two coordinators, one part after the other (docs/deployment.md)."""
    made = pair(pytestconfig.getoption("--chaos-pair"), tmp_path / "models")
    async with site(tmp_path, made.target, made.draft, targets=2, coordinators=2) as stack:
        balanced = [stack.url(0), stack.url(1)]
        load = await _load(stack, made.tokens, balanced)
        for part in (stack.draft, *stack.targets, *stack.coordinators):
            took_s = await _renew(stack, part, balanced)
            print(f"\n{part.role}: new within {took_s:.1f} s, {load.finished} answers", end="")
        await load.stop()
        assert not _failed(load)
        assert load.finished > _CLIENTS


async def _renew(stack: Site, part: Part, balanced: list[str]) -> float:
    """What a platform does: out of the balancer, SIGTERM, wait until the new one is ready, into the balancer."""
    began_s, starts, url = time.monotonic(), part.starts, f"http://127.0.0.1:{part.port}"
    if url in balanced:
        balanced.remove(url)
        await asyncio.sleep(0.5)
    part.send(signal.SIGTERM)

    async def is_new() -> bool:
        return part.starts > starts and await stack.is_well()

    await stack.until(is_new, f"a new {part.role} is attached")
    if part.role == "coordinator":
        balanced.append(url)
    return time.monotonic() - began_s


async def _drafts_more(stack: Site, than: float) -> bool:
    return await stack.series(DRAFTED) > than
