"""The health question that containers ask of a part."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest

from coordinator.serve import Coordinator
from outrider import health
from outrider.rpc.options import DRAFT_SERVICE_NAME
from outrider.rpc.server import Server


async def test_a_server_is_healthy_while_it_serves_and_not_before() -> None:
    """Guards `depends_on: service_healthy` against a model that still loads."""
    server = Server(DRAFT_SERVICE_NAME, message_limit=1 << 20)
    port = await server.start("127.0.0.1", 0)
    try:
        answers = []
        for value in (False, True):
            await server.set_serving(value=value)
            answers.append(await asyncio.to_thread(health.ask, f"127.0.0.1:{port}"))
        assert answers == [(False, f"127.0.0.1:{port}: NOT_SERVING"), (True, f"127.0.0.1:{port}: SERVING")]
    finally:
        await server.stop()


def test_nobody_there_is_a_line_and_exit_code_1() -> None:
    """Guards the probe's output, which `docker inspect` shows. Port 9 is closed everywhere."""
    done = subprocess.run([sys.executable, "-m", "outrider.health", "127.0.0.1:9"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "UNAVAILABLE" in done.stdout
    assert not done.stderr


@pytest.mark.parametrize(("status", "serving"), [(200, True), (503, False)])
def test_an_url_is_healthy_by_its_status(monkeypatch: pytest.MonkeyPatch, status: int, serving: bool) -> None:
    monkeypatch.setattr(httpx, "get", lambda url, **_: httpx.Response(status, text="why"))
    assert health.ask("http://127.0.0.1:1/ready") == (serving, f"http://127.0.0.1:1/ready: {status} why")


def test_the_probe_imports_neither_torch_nor_the_command_line() -> None:
    """Guards the cost of a check that runs every few seconds on every part."""
    code = (
        "import sys, outrider.health as h; h.ask('127.0.0.1:9', 0.1);"
        "print([m for m in ('torch', 'typer', 'rich', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_what_a_start_leaves_is_kept_from_the_collector_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards answers against a full collection that walks through libraries and vocabulary, 0.1 s each time."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr("coordinator.serve._HEALTH_POLL_S", 0.001)
    serving: list[bool] = []

    async def set_serving(*, value: bool) -> None:
        server.serving = value
        serving.append(value)

    server = SimpleNamespace(serving=False, set_serving=set_serving)
    readiness = SimpleNamespace(reason="loading")
    replica = SimpleNamespace(_server=server, _front=SimpleNamespace(readiness=readiness))
    reporting = asyncio.create_task(Coordinator._report_health(replica))
    async with asyncio.timeout(30):
        for reason, told in (("loading", []), ("", [True]), ("gone", [True, False]), ("", [True, False, True])):
            readiness.reason = reason
            while serving != told:  # noqa: ASYNC110 - what is waited for is a list
                await asyncio.sleep(0.001)
            assert calls == (["collect", "freeze"] if told else [])
    reporting.cancel()
