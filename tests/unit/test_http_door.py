"""The coordinator's own HTTP door, over sockets: requests, a busy port, and an end that tears nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from coordinator import http_door
from coordinator.app import build_app
from coordinator.front import Front
from coordinator.http_door import HttpDoor
from outrider.errors import Unavailable
from outrider.ports import free_port
from outrider.rpc.server import PortInUse
from tests.scripted_decoder import MODEL, ScriptedDecoder, running_front

BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 12, "stream": True}


@asynccontextmanager
async def door_of(front: Front) -> AsyncIterator[tuple[HttpDoor, httpx.AsyncClient]]:
    port = free_port()
    door = await HttpDoor.open(build_app(lambda: front), "127.0.0.1", port)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
            yield door, client
    finally:
        await door.close()


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


async def test_a_stream_that_is_running_ends_before_the_door_closes() -> None:
    """Guards the drain: the running stream is sent to its end, new requests get 503, and then nobody listens."""
    decoder = ScriptedDecoder()
    async with running_front(decoder) as front, door_of(front) as (door, client):
        assert (await client.get("/health")).status_code == 200
        decoder.gate = asyncio.Event()
        running = asyncio.create_task(client.post("/v1/completions", json=BODY))
        while not decoder.streams:  # noqa: ASYNC110 - as a client would
            await asyncio.sleep(0.001)
        draining = asyncio.create_task(front.drain(60))
        await asyncio.sleep(0)
        refused = await client.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await client.get("/ready")).status_code == 503
        assert not draining.done()
        decoder.gate.set()
        await draining
        closing = asyncio.create_task(door.close())
        said = events((await running).text)
        assert said[-1] == "[DONE]"
        assert json.loads(said[-2])["choices"][0]["finish_reason"] == "length"
        await closing
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


async def test_a_stream_that_outlives_the_drain_says_why_it_ends() -> None:
    """Guards clients against a torn stream: the error and the end are sent before the door closes."""
    decoder = ScriptedDecoder()
    async with running_front(decoder) as front, door_of(front) as (door, client):
        decoder.error, decoder.error_after = Unavailable("the coordinator is shutting down"), 6
        decoder.gate = asyncio.Event()
        decoder.gate.set()
        running = asyncio.create_task(client.post("/v1/completions", json=BODY))
        said = events((await running).text)
        await door.close()
    assert said[-1] == "[DONE]"
    assert json.loads(said[-2])["error"]["type"] == "service_unavailable_error"
    assert len(said) > 2


async def test_a_busy_port_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a door that is closed in silence; one that comes free soon is waited for."""
    monkeypatch.setattr(http_door, "_RETRY_S", 0.001)
    async with running_front(ScriptedDecoder()) as front:
        app = build_app(lambda: front)
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            opening = asyncio.create_task(HttpDoor.open(app, "127.0.0.1", port))
            await asyncio.sleep(0.005)
            assert not opening.done()
            monkeypatch.setattr(http_door, "_FREE_WITHIN_S", 0.0)
            with pytest.raises(PortInUse, match=f"127.0.0.1:{port}"):
                await HttpDoor.open(app, "127.0.0.1", port)
        await (await opening).close()
