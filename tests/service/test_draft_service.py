"""The draft service over gRPC: in this process where that suffices, as a process of its own where signals count."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.config import DraftConfig, parse
from draft_service.service import DraftService
from outrider.errors import InvalidArgument, Status
from outrider.rpc import codec
from outrider.rpc.hello import Hello
from outrider.rpc.options import DRAFT_SERVICE_NAME
from outrider.sampling import SamplingParams
from outrider.v1 import common_pb2, draft_pb2_grpc
from tests.service.harness import (
    ANSWER_WITHIN_S,
    PROPOSE,
    Item,
    RawLink,
    channel_to,
    draft_service,
    drafted,
    open_stream,
    propose,
    propose_link,
)
from tests.unit.tiny import tiny_llama

SCRIPT = "stub:perfect?tokens=9,8,7,6,5,4,3,2,1"
PROMPT = [5, 17, 3, 42]
GREEDY = SamplingParams(temperature=0.0, max_tokens=1_000)


async def info_of(channel: grpc.aio.Channel) -> common_pb2.ServiceInfo:
    response = await draft_pb2_grpc.DraftServiceStub(channel).GetInfo(common_pb2.GetInfoRequest(), timeout=30)
    return response.info


async def health_of(channel: grpc.aio.Channel, name: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=30, wait_for_ready=True)
    return response.status


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Asks again until an async condition holds; fails after `ANSWER_WITHIN_S`."""
    async with asyncio.timeout(ANSWER_WITHIN_S):
        while not await condition():  # every question is a call to the service: it waits by itself
            pass


async def test_a_round_of_32_streams_is_one_message_each_way() -> None:
    """Guards the wire's scaling: messages per round must not grow with the streams."""
    rows = [Item(stream_id, PROMPT) for stream_id in range(32)]
    async with draft_service(SCRIPT) as port, propose_link(port) as link:
        await link.send(propose(rows, 5, opens=tuple(open_stream(row.stream_id, PROMPT, GREEDY) for row in rows)))
        batch = await link.receive()
        assert drafted(batch) == {stream_id: [9, 8, 7, 6, 5] for stream_id in range(32)}
        rows = [Item(row.stream_id, [*PROMPT, 9, 8, 1], len(PROMPT)) for row in rows]
        await link.send(propose(rows, 2))
        assert drafted(await link.receive()) == {stream_id: [6, 5] for stream_id in range(32)}


async def test_timings_say_where_the_time_went() -> None:
    """Guards the cost tables, which are refined from them."""
    async with draft_service(f"{SCRIPT}&token_ms=2") as port, propose_link(port) as link:
        await link.send(propose([Item(1, PROMPT)], 3, opens=(open_stream(1, PROMPT, GREEDY),)))
        timings = (await link.receive()).timings
        assert timings.forward_ms >= 6.0
        assert timings.total_ms >= timings.forward_ms
        assert (timings.step_streams, timings.step_tokens) == (1, 1)


async def test_a_deadline_returns_what_is_done() -> None:
    """Guards the round against a slow draft: the stub takes 1 s per slot, the deadline comes within the first."""
    async with draft_service(f"{SCRIPT}&token_ms=1000") as port, propose_link(port) as link:
        await link.send(propose([Item(1, PROMPT)], 9, opens=(open_stream(1, PROMPT, GREEDY),), deadline_ms=900))
        assert drafted(await link.receive()) == {1: [9]}


async def test_prompt_lookup_serves_the_same_protocol() -> None:
    """Guards the seam: the coordinator must not care what drafts."""
    text = [1, 2, 3, 4, 1, 2]
    async with draft_service("ngram") as port, propose_link(port) as link, channel_to(port) as channel:
        await link.send(propose([Item(1, text)], 3, opens=(open_stream(1, text),)))
        assert drafted(await link.receive()) == {1: [3, 4, 1]}
        info = await info_of(channel)
        assert (info.draft_kind, info.vocab_rows, info.open_streams) == ("ngram", 0, 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await draft_pb2_grpc.DraftServiceStub(channel).GetTokenizer(common_pb2.GetTokenizerRequest()).read()
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_info_and_tokenizer_describe_the_model_that_runs(tmp_path: Path) -> None:
    """Guards against the wrong model being loaded, which drafts badly and says nothing."""
    folder = tiny_llama(tmp_path / "tiny", vocab=260, tokenizer=True)
    async with (
        draft_service(str(folder), dtype="float32", kv_cache_tokens=1024, max_num_seqs=4, threads=1) as port,
        channel_to(port) as channel,
    ):
        info = await info_of(channel)
        config = json.loads((folder / "config.json").read_text())
        assert (info.model_id, info.draft_kind, info.dtype) == ("tiny", "causal_lm", "float32")
        assert info.vocab_rows == config["vocab_size"]
        assert info.parameters > 0
        assert len(info.weight_hash) == len(info.tokenizer_hash) == 64
        assert info.tokenizer_size == 257
        assert list(info.eos_token_ids) == [0]
        assert (info.kv_cache_tokens, info.max_num_seqs, info.block_size) == (1024, 4, 16)
        files: dict[str, bytes] = {}
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        async for piece in stub.GetTokenizer(common_pb2.GetTokenizerRequest()):
            files[piece.file_name] = files.get(piece.file_name, b"") + piece.data
        assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"} <= set(files)
        assert all((folder / name).read_bytes() == data for name, data in files.items())


async def test_a_stub_names_the_built_in_tokenizer() -> None:
    """Guards the stub stack, which has no files."""
    async with draft_service("stub:perfect") as port, channel_to(port) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        pieces = [piece async for piece in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        assert [(piece.file_name, piece.data) for piece in pieces] == [("stub:bytes", b"")]


async def test_health_says_not_serving_while_the_model_loads() -> None:
    """Guards against traffic to a model that is still loading; calls meanwhile are told to come back."""
    service = DraftService(DraftConfig(model="stub:perfect", port=0))
    port = await service.start()
    try:
        async with channel_to(port) as channel:
            # `ready` has not been awaited: the service has not said that it serves, however fast the stub loads.
            assert await health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
            await service.ready()
            for name in ("", DRAFT_SERVICE_NAME):
                assert await health_of(channel, name) == health_pb2.HealthCheckResponse.SERVING
    finally:
        await service.stop()


async def test_a_model_that_cannot_be_loaded_stops_the_start_with_its_reason(tmp_path: Path) -> None:
    """Guards against a service that stays up without a model."""
    service = DraftService(DraftConfig(model=str(tmp_path / "nothing"), port=0))
    await service.start()
    with pytest.raises(Exception, match="nothing"):
        await service.ready()
    await service.stop()


async def test_a_malformed_column_ends_the_link_and_the_service_goes_on() -> None:
    """Guards the process against a broken peer."""
    async with draft_service(SCRIPT) as port:
        async with propose_link(port) as link:
            message = codec.propose_to_pb(propose([Item(1, PROMPT)], 3, opens=(open_stream(1, PROMPT, GREEDY),)))
            message.items.tokens += b"\0"
            await link.call.write(message)
            code, details = await link.ended()
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith("tokens: ")
        async with propose_link(port, epoch=2) as link:
            await link.send(propose([Item(1, PROMPT)], 3, opens=(open_stream(1, PROMPT, GREEDY),)))
            assert drafted(await link.receive()) == {1: [9, 8, 7]}


async def test_a_cancelled_link_frees_its_blocks_after_the_lease() -> None:
    """Guards the draft's pool against coordinators that vanish."""
    async with draft_service(SCRIPT, lease_s=0.2) as port, channel_to(port) as channel:
        async with propose_link(port) as link:
            await link.send(propose([Item(1, PROMPT)], 3, opens=(open_stream(1, PROMPT, GREEDY),)))
            await link.receive()
            assert (await info_of(channel)).kv_blocks_used == 1

        async def is_free() -> bool:
            info = await info_of(channel)
            return (info.open_streams, info.kv_blocks_used) == (0, 0)

        await until(is_free)


async def test_a_returning_coordinator_finds_its_streams() -> None:
    """Guards short network cuts: within the lease nothing has to be prefilled again."""
    async with draft_service(SCRIPT) as port:
        async with propose_link(port) as link:
            await link.send(propose([Item(1, PROMPT)], 3, opens=(open_stream(1, PROMPT, GREEDY),)))
            await link.receive()
        async with propose_link(port, epoch=2) as link:
            await link.send(propose([Item(1, [*PROMPT, 9, 8], len(PROMPT), generation=1)], 3))
            batch = await link.receive()
            assert batch.replies.status(0) == Status.OK
            assert drafted(batch) == {1: [7, 6, 5]}
            # Only the two committed slots were known already: nothing was fed twice.
            assert batch.replies.cached_lengths.tolist() == [len(PROMPT) + 2 + 2]


async def test_late_proposals_come_late_and_the_link_lives() -> None:
    """Guards the fault injection that the failure tests lean on."""
    async with draft_service("stub:bad?kind=late&ms=100&tokens=9,8,7&after=1") as port, propose_link(port) as link:
        loop = asyncio.get_running_loop()
        await link.send(propose([Item(1, PROMPT)], 2, opens=(open_stream(1, PROMPT, GREEDY),)))
        assert drafted(await link.receive()) == {1: [9, 8]}
        began = loop.time()
        await link.send(propose([Item(1, PROMPT, generation=1)], 2))
        assert drafted(await link.receive()) == {1: [9, 8]}
        assert loop.time() - began >= 0.1


async def test_health_answers_beside_many_open_links() -> None:
    """Guards probes against being starved by long-lived calls."""
    async with draft_service(SCRIPT) as port, channel_to(port) as channel:
        links = [RawLink[Any, Any](PROPOSE, channel) for _ in range(40)]
        for number, link in enumerate(links):
            await link.greet(Hello(coordinator_id=number.to_bytes(16), epoch=1))
        assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING
        for link in links:
            link.call.cancel()


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """`python -m draft_service` on a free port; yields once it serves."""
    command = (sys.executable, "-m", "draft_service", "--port", "0", *arguments)
    started = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        assert started.stderr is not None
        port = 0
        while b": serving" not in (line := await started.stderr.readline()):
            assert line, "the process ended before it served"
            if b"listening on" in line:
                port = int(line.rsplit(b":", 1)[1])
        yield started, port
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def exit_code(started: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(ANSWER_WITHIN_S):
        return await started.wait()


async def test_sigterm_drains_and_exits_with_success() -> None:
    """Guards rolling restarts: health at once, open streams may finish, then the process goes."""
    async with process("--model", SCRIPT, "--drain-seconds", "60") as (service, port), channel_to(port) as channel:
        async with propose_link(port) as link:
            await link.send(propose([Item(1, PROMPT)], 3, opens=(open_stream(1, PROMPT, GREEDY),)))
            await link.receive()
            service.send_signal(signal.SIGTERM)

            async def is_draining() -> bool:
                return await health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING

            await until(is_draining)
            await link.send(propose([Item(1, [*PROMPT, 9], len(PROMPT))], 2))
            assert drafted(await link.receive()) == {1: [8, 7]}
            await link.send(propose([], 0, closed=(1,)))
            assert (await link.ended())[0] == grpc.StatusCode.UNAVAILABLE
        assert await exit_code(service) == 0


async def test_a_second_process_on_one_port_says_so_and_fails() -> None:
    """Guards against two drafts that share a port unnoticed."""
    async with process("--model", "ngram") as (_, port):
        command = (sys.executable, "-m", "draft_service", "--model", "ngram", "--port", str(port))
        second = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, output = await second.communicate()
        assert second.returncode == 1
        assert f"127.0.0.1:{port}" in output.decode()
        assert "port in use" in output.decode()
        assert "Traceback" not in output.decode()


async def test_a_draft_that_dies_ends_the_link() -> None:
    """Guards the coordinator's notice of a dead draft."""
    async with (
        process("--model", "stub:bad?kind=die&after=1&tokens=9,8,7") as (service, port),
        propose_link(port) as link,
    ):
        await link.send(propose([Item(1, PROMPT)], 2, opens=(open_stream(1, PROMPT, GREEDY),)))
        assert drafted(await link.receive()) == {1: [9, 8]}
        await link.send(propose([Item(1, PROMPT, generation=1)], 2))
        assert (await link.ended())[0] == grpc.StatusCode.UNAVAILABLE
        assert await exit_code(service) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--model", ""], "model"),
        (["--model", "ngram", "--prompt-lookup-min", "5"], "prompt_lookup_max"),
        (["--model", "ngram", "--draft-sample-method", "best"], "draft_sample_method"),
        (["--model", "ngram", "--port", "70000"], "port"),
        (["--model", "ngram", "--drain-seconds", "nan"], "drain_seconds"),
        (["--model", "ngram", "--ssl-certfile", "x.pem"], "ssl_keyfile"),
    ],
)
def test_a_bad_value_is_refused_by_name(arguments: list[str], field: str) -> None:
    """Guards operators against a service that runs with another configuration than the one they wrote."""
    with pytest.raises(InvalidArgument) as caught:
        parse(arguments)
    assert caught.value.field == field


@pytest.mark.parametrize("arguments", [[], ["--model", "ngram", "--gamma", "3"], ["--model", "ngram", "--po", "1"]])
def test_unknown_and_missing_flags_are_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against configuration that is dropped in silence."""
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err
