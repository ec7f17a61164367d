"""Server start-up, health, error mapping and transport options."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.errors import InvalidArgument, Mismatch, OutriderError, Overloaded, Status
from outrider.rpc.errors import from_rpc_error, to_code
from outrider.rpc.files import raise_file_limit
from outrider.rpc.options import (
    DRAFT_SERVICE_NAME,
    KEEPALIVE_TIME_MS,
    MAX_CONNECTIONS,
    MIN_PING_INTERVAL_MS,
    channel_options,
    message_limit,
    server_options,
)
from outrider.rpc.server import PortInUse, Server, run
from outrider.v1 import common_pb2, draft_pb2_grpc
from tests.service.harness import channel_to

LIMIT = 1 << 20


class Servicer(draft_pb2_grpc.DraftServiceServicer):
    """Raises what the test says."""

    def __init__(self) -> None:
        self.error: BaseException = OutriderError("unset")

    async def GetInfo(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise self.error

    async def GetTokenizer(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        yield common_pb2.GetTokenizerResponse(file_name="first")
        raise self.error


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, Servicer, int]]:
    server, servicer = Server(DRAFT_SERVICE_NAME, message_limit=LIMIT), Servicer()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server.grpc)
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, servicer, port
    finally:
        await server.stop()


async def check(channel: grpc.aio.Channel, name: str) -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=30)
    return response.status


async def test_health_follows_loading_serving_and_draining_under_both_names() -> None:
    """Guards against traffic to a model that is still loading, and against a health check that knows one name only."""
    states = health_pb2.HealthCheckResponse
    async with serving() as (server, _, port), channel_to(port) as channel:
        for value, state in ((None, states.NOT_SERVING), (True, states.SERVING), (False, states.NOT_SERVING)):
            if value is not None:
                await server.set_serving(value=value)
            assert [await check(channel, name) for name in ("", DRAFT_SERVICE_NAME)] == [state, state]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(channel, "no.such.Service")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_service() -> None:
    """Guards grpcurl and its kin, which operators use without the proto files."""
    async with serving() as (_, _, port), channel_to(port) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        assert DRAFT_SERVICE_NAME in {service.name for service in response.list_services_response.service}
        call.cancel()


async def test_a_second_server_on_one_port_is_an_error_that_names_it() -> None:
    """Guards against two servers that share a port and split the calls between an old and a new process."""
    async with serving() as (_, _, port):
        second = Server(DRAFT_SERVICE_NAME, message_limit=LIMIT)
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}.*port in use"):
            await second.start("127.0.0.1", port)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InvalidArgument("top_p", "must be above 0"), grpc.StatusCode.INVALID_ARGUMENT, "top_p: must be above 0"),
        (Mismatch("two tokenizers"), grpc.StatusCode.FAILED_PRECONDITION, "two tokenizers"),
        (RuntimeError("secret path"), grpc.StatusCode.INTERNAL, "RuntimeError"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
async def test_what_a_handler_raises_becomes_a_status(
    error: BaseException, code: grpc.StatusCode, text: str, streaming: bool
) -> None:
    """Guards clients against UNKNOWN for everything, and against internals in the message of a bug."""
    async with serving() as (_, servicer, port), channel_to(port) as channel:
        servicer.error = error
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if streaming:
                async for _ in stub.GetTokenizer(common_pb2.GetTokenizerRequest()):
                    pass
            else:
                await stub.GetInfo(common_pb2.GetInfoRequest())
        assert caught.value.code() == code
        assert text in (caught.value.details() or "")
        assert "secret" not in (caught.value.details() or "")


async def test_overload_says_when_to_come_back_and_survives_the_round_trip() -> None:
    """Guards the Retry-After that the HTTP door derives from it."""
    async with serving() as (_, servicer, port), channel_to(port) as channel:
        servicer.error = Overloaded("full", retry_after_s=2.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await draft_pb2_grpc.DraftServiceStub(channel).GetInfo(common_pb2.GetInfoRequest())
        error = from_rpc_error(caught.value, "the draft")
        assert isinstance(error, Overloaded)
        assert error.retry_after_s == 2.5
        servicer.error = InvalidArgument("min_p", "is NaN")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await draft_pb2_grpc.DraftServiceStub(channel).GetInfo(common_pb2.GetInfoRequest())
        error = from_rpc_error(caught.value, "the draft")
        assert isinstance(error, InvalidArgument)
        assert error.field == "min_p"


def test_every_status_has_the_grpc_code_of_its_name() -> None:
    """Guards the two number spaces, which are the same by design only."""
    for status in Status:
        error = OutriderError("x")
        error.status = status
        assert to_code(error).name == status.name


def test_clients_ping_no_more_often_than_servers_allow() -> None:
    """Guards against GOAWAY "too_many_pings" after some idle minutes."""
    client, server = dict(channel_options()), dict(server_options())
    assert KEEPALIVE_TIME_MS >= 2 * MIN_PING_INTERVAL_MS
    assert client["grpc.keepalive_time_ms"] >= 2 * server["grpc.http2.min_ping_interval_without_data_ms"]
    assert server["grpc.so_reuseport"] == 0


async def test_proxy_variables_do_not_catch_calls_inside_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards machines behind a company proxy."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serving() as (_, _, port), channel_to(port) as channel:
        assert await check(channel, "") == health_pb2.HealthCheckResponse.NOT_SERVING


def test_the_message_limit_grows_with_what_a_link_may_carry() -> None:
    """Guards long prompts and dense rows against a limit that somebody once thought large."""
    small = message_limit(max_num_seqs=4, max_model_len=1_024, max_slots=4, vocab_rows=256)
    assert small > 16 * 1_024 * 4
    dense = message_limit(max_num_seqs=4, max_model_len=1_024, max_slots=4, vocab_rows=150_000)
    assert dense > 4 * 5 * 150_000 * 4
    assert message_limit(max_num_seqs=512, max_model_len=10**6, max_slots=16, vocab_rows=150_000) == 2**31 - 1


async def test_connections_beyond_the_limit_are_closed_and_the_others_served() -> None:
    """Guards memory and file descriptors against clients that open connections without end."""
    assert raise_file_limit() > 2 * MAX_CONNECTIONS + 200
    async with serving() as (_, _, port), channel_to(port) as channel:
        await check(channel, "")
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_CONNECTIONS + 100)]
        try:
            async with asyncio.timeout(30):
                while sum(map(_is_closed, idle)) < 100:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert await check(channel, "") == health_pb2.HealthCheckResponse.NOT_SERVING
        finally:
            for connection in idle:
                connection.close()
        async with asyncio.timeout(30), channel_to(port) as another:
            await another.channel_ready()


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


async def test_sigterm_drains_and_a_second_one_stops_at_once() -> None:
    """Guards operators: the first signal lets streams finish, the second means it."""
    draining = asyncio.Event()
    cancelled = asyncio.Event()

    async def drain(grace_s: float) -> None:
        draining.set()
        try:
            await asyncio.sleep(grace_s)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving() as (server, _, _):
        await server.set_serving(value=True)
        running = asyncio.create_task(server.run_until_signal(drain, grace_s=600.0))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(draining.wait(), 30)
        assert not server.serving
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 30)
        assert cancelled.is_set()


def test_a_failed_start_is_one_line_and_a_non_zero_exit(caplog: pytest.LogCaptureFixture) -> None:
    """Guards the command line against tracebacks for ordinary mishaps."""

    async def main() -> None:
        raise PortInUse("cannot listen on 127.0.0.1:1: port in use")

    assert run(main()) == 1
    assert caplog.messages == ["cannot listen on 127.0.0.1:1: port in use"]
