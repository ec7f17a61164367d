"""What a whole stack at gamma = 0 keeps of the bare engine loop's pace.

    python bench/plain_overhead.py [--tokens 60] [--rounds 3]

The target is a stub whose steps take a fixed time (22, 34 and 60 ms for 1, 8 and 32 streams, what a model of 135 M
parameters takes on two cores), so that processes do not compete for the cores and the ratio is that of the code alone.

- *bare*: the engine's own loop over the same batch: forward, then judging the rows; no scheduler, no messages.
- *stack*: a target service in a process of its own, the coordinator's gRPC door, and one client call per stream; the
  time per token is that between the first and the last token of the streams.

Bars: the stack keeps 0.97 of the bare loop's pace at every number of streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import torch

from coordinator.config import DecoderConfig
from coordinator.decoder import Decoder
from coordinator.front import Front, FrontConfig
from coordinator.servicer import CoordinatorServicer
from outrider.client import request
from outrider.engine.span import Span
from outrider.engine.stub import parse
from outrider.engine.stub_model import load_stub
from outrider.rpc.options import COORDINATOR_SERVICE_NAME, channel_options
from outrider.rpc.server import Server
from outrider.sampling import SamplingParams
from outrider.seam import StreamOpen
from outrider.v1 import coordinator_pb2_grpc
from target_service.proposal import PLAIN
from target_service.round import Round
from target_service.scoring import judge

STEP_MS = {1: 22, 8: 34, 32: 60}
BAR = 0.97
READY_WITHIN_S = 120.0


def stub(streams: int) -> str:
    """A target that never ends a text by itself, with the step time of so many streams."""
    return f"stub:script?tokens={','.join(str(65 + i % 26) for i in range(2000))}&fixed_ms={STEP_MS[streams]}"


def bare_token_ms(streams: int, tokens: int) -> float:
    """Milliseconds per token and stream of the engine's loop alone."""
    model = load_stub(parse(stub(streams)))
    opened = StreamOpen(stream_id=1, prompt_length=8, params=SamplingParams(temperature=0.0, max_tokens=tokens))
    text = [65] * 8
    started = time.perf_counter()
    with torch.inference_mode():
        for _ in range(tokens):
            spans = [Span(i, text[-1:], len(text) - 1, 1, (), 8, len(text)) for i in range(streams)]
            verdicts = judge(model.forward(spans), [Round(opened, text, len(text), PLAIN)] * streams)
            assert len(verdicts) == streams
            text = [*text, 66]
    return 1_000 * (time.perf_counter() - started) / tokens


async def stack_token_ms(stub_of: coordinator_pb2_grpc.CoordinatorServiceStub, streams: int, tokens: int) -> float:
    """Milliseconds per token and stream through client, coordinator and target."""

    async def one(index: int) -> tuple[float, float, int]:
        message = request([65 + index % 26] * 8, max_tokens=tokens, temperature=0.0)
        first = last = 0.0
        count = 0
        async for response in stub_of.Generate(message):
            last = time.perf_counter()
            first = first or last
            count += len(response.token_ids)
        return first, last, count

    ends = await asyncio.gather(*(one(index) for index in range(streams)))
    if any(count != tokens for _, _, count in ends):
        raise RuntimeError(f"{[count for _, _, count in ends]} tokens instead of {tokens} each")
    return 1_000 * statistics.median((last - first) / (count - 1) for first, last, count in ends)


@asynccontextmanager
async def target(streams: int) -> AsyncIterator[str]:
    """A target service in a process of its own; its address."""
    with_port = ["--port", "0", "--max-num-seqs", "64", "--profile-seconds", "0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "target_service", "--model", stub(streams), *with_port, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            async for line in process.stderr:
                if "listening on" in line.decode():
                    yield line.decode().split("listening on ")[1].split()[0].rstrip(",")
                    return
        raise RuntimeError("the target did not start")
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def door(address: str) -> AsyncIterator[coordinator_pb2_grpc.CoordinatorServiceStub]:
    """A coordinator on a target, and a client's stub of its gRPC door."""
    front = Front(Decoder(DecoderConfig(target=(address,), num_speculative_tokens=0)), FrontConfig())
    await front.start()
    server = Server(COORDINATOR_SERVICE_NAME, message_limit=1 << 20)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(CoordinatorServicer(front), server.grpc)
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options(1 << 20)) as channel:
        async with asyncio.timeout(READY_WITHIN_S):
            while front.readiness.reason:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield coordinator_pb2_grpc.CoordinatorServiceStub(channel)
    await server.stop()
    await front.close()


async def measure(streams: int, tokens: int, rounds: int) -> list[float]:
    """Bare over stack, once per round; above 1 is impossible but for noise."""
    ratios = []
    async with target(streams) as address, door(address) as stub_of:
        await stack_token_ms(stub_of, streams, 8)
        for _ in range(rounds):
            bare = await asyncio.to_thread(bare_token_ms, streams, tokens)
            ratios.append(bare / await stack_token_ms(stub_of, streams, tokens))
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[int, float] = {}
    for streams in STEP_MS:
        ratios = asyncio.run(measure(streams, arguments.tokens, arguments.rounds))
        median = found[streams] = statistics.median(ratios)
        shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{streams:3} streams, {STEP_MS[streams]} ms steps: {median:.3f} of the bare loop's pace ({shown})")
    worst = min(found.values())
    print(f"worst {worst:.3f}, bar {BAR}: {'met' if worst >= BAR else 'missed'}")
    print(json.dumps({"bench": "plain_overhead", "pace_by_streams": found, "bar": BAR}))


if __name__ == "__main__":
    main()
