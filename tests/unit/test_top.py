"""`outrider top`: figures from two looks, and a frame of a coordinator that answers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from coordinator.costs import Costs
from coordinator.counters import Counters
from coordinator.decoding_series import DecodingSeries
from coordinator.part_series import PartSeries
from coordinator.parts import kv_use, replayed
from coordinator.profiles import ASK_S, Profiles
from coordinator.streams import Registry
from outrider.cli import app
from outrider.seam import Timings
from outrider.top.figures import Figures, figures
from outrider.top.sample import Sample, parse
from tests.scripted_decoder import ScriptedDecoder

READY: dict[str, Any] = {
    "degraded": [{"part": "draft", "reason": "it hangs", "since_s": 12.4}],
    "target": {"model": "large"},
    "draft": None,
}


class Coordinator:
    """Its series, moved by rounds."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.registry = CollectorRegistry()
        self.registry.register(DecodingSeries(self.counters, 4))
        state = ScriptedDecoder().state._replace(kv_use={"target": 0.25})
        self.registry.register(PartSeries(lambda: state))

    def work(self) -> None:
        for accepted in (2, 0, 1, 1):
            self.counters.count_round(accepted + 1, 3, min(accepted + 1, 3), accepted)
            self.counters.gamma[3] += 1
        self.counters.draft_skipped["kv"] += 20
        self.counters.on_step[0]("target", Timings(forward_ms=20, total_ms=25))

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()


def look(coordinator: Coordinator, at_s: float) -> Sample:
    return parse(coordinator.text, READY, is_ready=True, at_s=at_s)


def two_looks() -> Figures:
    coordinator = Coordinator()
    coordinator.work()
    before = look(coordinator, 100.0)
    coordinator.work()
    return figures(before, look(coordinator, 110.0))


def test_figures_are_of_the_time_between_the_looks() -> None:
    found = two_looks()
    assert found.gamma == 3
    assert found.acceptance == pytest.approx(4 / 12)
    assert found.acceptance_per_position == (0.75, 0.25)
    assert found.mean_acceptance_length == 2
    assert found.step_ms["target"]["forward"] == pytest.approx(20)
    assert found.step_ms["draft"]["forward"] is None
    assert found.skipped_per_s == {"kv": 2}
    assert found.kv_use == {"target": 0.25, "draft": 0}
    assert found.degraded == ("draft: it hangs (for 12 s)",)


def test_a_time_without_rounds_has_no_acceptance_and_a_restart_no_negative_rate() -> None:
    coordinator = Coordinator()
    coordinator.work()
    before = look(coordinator, 0.0)
    idle = figures(before, look(coordinator, 1.0))
    assert (idle.gamma, idle.acceptance, idle.acceptance_per_position, idle.mean_acceptance_length) == (
        None, None, (), None,
    )  # fmt: skip
    coordinator.work()
    fresh = Coordinator()
    fresh.work()
    restarted = figures(look(coordinator, 0.0), look(fresh, 10.0))
    assert restarted.skipped_per_s == {"kv": 2} and restarted.mean_acceptance_length == 2


def test_a_coordinator_that_is_not_ready_says_why() -> None:
    body = {"degraded": [], "error": {"message": "no target answers"}}
    sample = replace(parse(Coordinator().text, body, is_ready=False, at_s=0.0))
    assert figures(sample, sample).degraded == ("not ready: no target answers",)


@contextmanager
def served(coordinator: Coordinator) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            coordinator.work()
            body = coordinator.text if self.path == "/metrics" else json.dumps(READY)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_one_frame() -> None:
    with served(Coordinator()) as url:
        answer = CliRunner().invoke(app, ["top", "--url", url, "--once", "--interval", "0.02"])
    assert answer.exit_code == 0, answer.output
    for text in ("large", "gamma 3.00", "tokens per drafted round 2.00", "75.0%", "25.0%", "kv ", "draft: it hangs"):
        assert text in answer.stdout


def test_who_does_not_answer_is_an_error_and_so_is_a_bad_interval() -> None:
    assert CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:9", "--once"]).exit_code == 1
    assert CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:9", "--interval", "0"]).exit_code == 1


def test_kv_in_use_and_replayed_steps_are_over_all_services() -> None:
    parts: Any = [
        SimpleNamespace(kv_blocks_used=used, kv_blocks_total=total, steps_replayed=used, steps=total)
        for used, total in ((5, 10), (10, 30))
    ]
    for share in (kv_use, replayed):
        assert share([*parts, None]) == 15 / 40
        assert share([]) is None


async def test_services_are_asked_again_but_seldom() -> None:
    """Guards the age of what they say of their KV, and the services against being asked all the time."""
    asked = []

    class Link:
        is_up, info, round_trip_s = True, SimpleNamespace(costs=None), 0.0

        async def refresh(self) -> None:
            asked.append(self)

    links: Any = [Link(), Link()]
    draft: Any = Link()
    profiles = Profiles(Costs(), links, draft, Registry())
    start_s = time.monotonic()
    for after_s in (0.0, 0.25, ASK_S - 0.1, ASK_S + 0.1):
        profiles.watch(start_s + after_s)
        await asyncio.sleep(0)
    assert len(asked) == 6 and set(asked) == {*links, draft}
