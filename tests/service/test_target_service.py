"""The target service over real gRPC: what it says of itself, links, leases, processes and step formation."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.engine.stub_model import StubModel
from outrider.errors import InvalidArgument, Status
from outrider.rpc.info import ServiceInfo
from outrider.sampling import Rule, SamplingParams
from outrider.seam import VerdictBatch, VerifyBatch
from outrider.v1 import common_pb2, target_pb2_grpc
from target_service.config import TargetConfig
from target_service.service import TargetService
from tests.service.harness import ANSWER_WITHIN_S, RawLink, channel_to, verify_link
from tests.service.stack import LOAD_WITHIN_S
from tests.unit.target_driver import Draft, Stream, Verdict, close, plain, rows_of, verify
from tests.unit.tiny import tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=10_000)
SAMPLED = SamplingParams(max_tokens=10_000)
TENFOLD = "stub:markov?fixed_ms=100&free_tokens=16&token_ms=5"


@asynccontextmanager
async def serving(model: str, *, lease_s: float = 10.0) -> AsyncIterator[int]:
    """A target service in this process; its port."""
    service = TargetService(TargetConfig(model=model, port=0, threads=1, kv_cache_tokens=8192), lease_s)
    port = await service.start()
    try:
        await asyncio.wait_for(service.ready(), ANSWER_WITHIN_S)
        yield port
    finally:
        await service.stop()


async def info(port: int) -> ServiceInfo:
    async with channel_to(port) as channel:
        answer = await target_pb2_grpc.TargetServiceStub(channel).GetInfo(common_pb2.GetInfoRequest())
    return answer.info


async def comes_to_nothing(port: int) -> None:
    """Waits until no stream and no KV block is held."""
    async with asyncio.timeout(ANSWER_WITHIN_S):
        while (said := await info(port)).open_streams or said.kv_blocks_used:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def verdicts(link: RawLink[VerifyBatch, VerdictBatch], n: int) -> list[Verdict]:
    """The next n reply items."""
    found: list[Verdict] = []
    while len(found) < n:
        found += rows_of(await link.receive())
    assert len(found) == n
    return found


async def test_a_service_says_what_it_is(tmp_path: Path) -> None:
    """Guards GetInfo, GetTokenizer and health of a service with weights."""
    folder = tiny_llama(tmp_path / "tiny", vocab=260, tokenizer=True)
    async with serving(str(folder)) as port:
        said = await info(port)
        assert (said.model_id, said.dtype, said.vocab_rows, said.tokenizer_size) == ("tiny", said.dtype, 260, 257)
        assert said.kv_blocks_total * said.block_size == said.kv_cache_tokens == 8192
        assert said.batch_invariant and said.tokenizer_hash and said.weight_hash and list(said.eos_token_ids) == [0]
        async with channel_to(port) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            files: dict[str, bytes] = {}
            async for piece in stub.GetTokenizer(common_pb2.GetTokenizerRequest()):
                files[piece.file_name] = files.get(piece.file_name, b"") + piece.data
            assert files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
            assert "config.json" in files
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "outrider.v1.TargetService"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_many_streams_share_a_message_and_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the round trip of rounds and runs of several streams in one message, and the counters in GetInfo."""
    monkeypatch.setattr(StubModel, "replayed", True)
    async with serving("stub:script?tokens=5,6,7,8,9,10&vocab=16") as port, verify_link(port) as link:
        streams = [Stream(index, [1, 2], GREEDY) for index in range(3)]
        drafts = [Draft([5, 6]), Draft([5, 1]), Draft([])]
        await link.send(verify(list(zip(streams, drafts, strict=True))))
        batch = await link.receive()
        found = {verdict.stream_id: verdict for verdict in rows_of(batch)}
        assert batch.timings.step_streams == 3
        for stream, draft in zip(streams, drafts, strict=True):
            stream.accept(found[stream.stream_id], draft)
        assert [stream.text for stream in streams] == [[5, 6, 7], [5, 6], [5]]
        said = await info(port)
        assert (said.steps, said.step_streams_total, said.step_tokens_total, said.open_streams) == (1, 3, 10, 3)
        assert said.steps_replayed == 1

        await link.send(plain(streams, 2, closed=[1]))
        runs = await verdicts(link, 5)
        assert [verdict.status for verdict in runs if verdict.stream_id == 1] == [Status.NOT_FOUND]
        assert [verdict.bonus for verdict in runs if verdict.stream_id == 0] == [8, 9]
        assert [verdict.bonus for verdict in runs if verdict.stream_id == 2] == [6, 7]


async def test_speculation_over_the_wire_does_not_change_the_text(tmp_path: Path) -> None:
    """Guards losslessness with weights in bf16 through codec and engine thread: coupled, against a plain run."""
    folder = tiny_llama(tmp_path / "tiny")
    async with serving(str(folder)) as port, verify_link(port) as link:
        plainly = Stream(1, [3, 1, 4], SAMPLED, rule=Rule.COUPLED, seed=8)
        await link.send(plain([plainly], 40))
        for verdict in await verdicts(link, 40):
            plainly.accept(verdict, None)
        drafted = Stream(2, [3, 1, 4], SAMPLED, rule=Rule.COUPLED, seed=8)
        draw = np.random.default_rng(0)
        while len(drafted.text) < 40:
            at = len(drafted.text)
            right = plainly.text[at : at + int(draw.integers(1, 6))]
            draft = Draft([token if draw.random() < 0.7 else int(draw.integers(128)) for token in right])
            await link.send(verify([(drafted, draft)]))
            drafted.accept((await verdicts(link, 1))[0], draft)
        assert drafted.text[:40] == plainly.text
        assert drafted.accepted > 10


async def test_a_lost_link_keeps_its_streams_for_a_lease() -> None:
    """Guards against KV that leaks with its coordinator, and against losing it on a short break."""
    async with serving("stub:markov", lease_s=1.0) as port:
        stream = Stream(7, [70] * 20, SAMPLED)
        async with verify_link(port, epoch=1) as link:
            await link.send(plain([stream], 1))
            stream.accept((await verdicts(link, 1))[0], None)
        async with verify_link(port, epoch=2) as link:
            stream.generation += 1
            await link.send(plain([stream], 1))
            (verdict,) = await verdicts(link, 1)
            assert verdict.status is Status.OK
        await comes_to_nothing(port)


async def test_closed_streams_give_their_blocks_back_during_a_run() -> None:
    """Guards against a cancelled client whose run goes on."""
    async with serving("stub:markov?fixed_ms=5") as port, verify_link(port) as link:
        stream = Stream(7, [70] * 20, SAMPLED)
        await link.send(plain([stream], 5_000))
        await verdicts(link, 1)
        await link.send(close(7))
        await comes_to_nothing(port)


class Formed(NamedTuple):
    """Steps and their streams, once every stream is under way; a step's verdicts on one link are one message."""

    steps: int
    streams: int


async def form_steps(streams: int, gamma: int, rounds: int) -> Formed:
    """B streams started 5 ms apart, each drafting for 10 ms per slot between its rounds."""
    async with serving(TENFOLD) as port, verify_link(port) as link:
        running = {index: Stream(index, [70] * 8, GREEDY) for index in range(streams)}
        done = dict.fromkeys(running, 0)
        drafting: set[asyncio.Task[None]] = set()

        async def ask(wanted: list[Stream]) -> None:
            await asyncio.sleep(0.010 * gamma)
            drafts = [Draft([70 + slot for slot in range(gamma)]) for _ in wanted]
            await link.send(verify(list(zip(wanted, drafts, strict=True))) if gamma else plain(wanted, 8))

        async def start() -> None:
            for stream in list(running.values()):
                drafts = [(stream, Draft([70] * gamma))]
                await link.send(verify(drafts) if gamma else plain([stream], 8))
                await asyncio.sleep(0.005)

        drafting.add(asyncio.create_task(start()))
        formed = Formed(0, 0)
        while running:
            batch = await link.receive()
            if min(done.values()) >= 3:
                formed = Formed(formed.steps + 1, formed.streams + batch.timings.step_streams)
            answered = rows_of(batch)
            again = []
            for verdict in answered:
                stream = running.get(verdict.stream_id)
                if stream is None:
                    continue
                assert verdict.status is Status.OK, verdict.error
                stream.accept(verdict, Draft([70] * gamma) if gamma else None)
                done[stream.stream_id] += 1
                if done[stream.stream_id] == rounds:
                    del running[stream.stream_id]
                elif gamma or done[stream.stream_id] % 4 == 0:
                    again.append(stream)
            if again and len(running) == streams:
                drafting.add(asyncio.create_task(ask(again)))
            elif len(running) < streams:
                break
        await asyncio.gather(*drafting)
        return formed


@pytest.mark.parametrize("streams", [8, 16])
async def test_staggered_streams_ride_together(streams: int) -> None:
    """Guards the step formation through threads and sockets, for gamma 0, 1 and 4 at once: a service that takes what is
    ready splits the streams into two cohorts for ever."""
    gammas = (0, 1, 4)
    formed = await asyncio.gather(*(form_steps(streams, gamma, rounds=14) for gamma in gammas))
    for gamma, found in zip(gammas, formed, strict=True):
        assert found.steps >= 8
        assert found.streams / found.steps >= 0.95 * streams, f"gamma {gamma}: {found}"


async def run_process(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "target_service", *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await asyncio.wait_for(process.communicate(), LOAD_WITHIN_S)
    assert process.returncode is not None
    return process.returncode, stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "/no/such/folder"], 1, "/no/such/folder"),
        (["--model", "stub:markov", "--max-num-batched-tokens", "8"], 2, "max_num_batched_tokens"),
        (["--model", "stub:markov", "--no-such-flag"], 2, "--no-such-flag"),
    ],
)
async def test_a_bad_start_is_one_line(arguments: list[str], code: int, message: str) -> None:
    """Guards against a traceback, and against a flag that is ignored."""
    found, stderr = await run_process(*arguments, "--port", "0")
    assert found == code
    assert message in stderr and "Traceback" not in stderr


async def test_a_draft_is_no_target() -> None:
    """Guards against a stub that answers as a target what only a draft may say."""
    with pytest.raises(InvalidArgument, match="is a draft"):
        TargetService(TargetConfig(model="stub:perfect"))


async def test_sigterm_drains() -> None:
    """Guards the life of the process: it listens, becomes healthy, lets the open stream end, and leaves with 0."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "target_service", "--model", "stub:markov?fixed_ms=20", "--port", "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    port = 0
    try:
        async with asyncio.timeout(LOAD_WITHIN_S):
            while line := (await process.stderr.readline()).decode():
                if "listening on" in line:
                    port = int(line.rsplit(":", 1)[1])
                if "serving" in line:
                    break
        async with verify_link(port) as link:
            await link.send(plain([Stream(1, [70], GREEDY)], 20))
            await verdicts(link, 1)
            process.send_signal(signal.SIGTERM)
            await verdicts(link, 19)
            await link.send(close(1))
            assert (await link.ended())[0] is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(process.wait(), ANSWER_WITHIN_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
