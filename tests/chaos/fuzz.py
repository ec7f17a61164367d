"""Malformed messages for a link, and what a service does with them.

    python -m tests.chaos.fuzz --count 100000     both services in processes of their own, memory watched

Messages begin as valid ones of the kind that a coordinator sends; then bytes are flipped, cut out, doubled, replaced by
the numbers at which parsers break, or taken from another message. A service must end the link with a status that says
why, or answer items with one; it must never die, hang, or keep what it was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.hello import Hello, hello_to_pb
from outrider.rpc.options import channel_options
from outrider.seam import VerifyBatch
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tests.e2e.processes import service
from tests.service.harness import (
    PROPOSE,
    VERIFY,
    ClientKind,
    Item,
    channel_to,
    items_of,
    no_slots,
    open_stream,
    propose,
)

ALLOWED = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
    }
)
"""How a link may end. OK: the message was understood after all and the test hung up; CANCELLED: so it did."""

_CLIENT_LATE = "Internal error from Core"
"""What grpc.aio makes of a client that hangs up on a link that the server has ended in the meantime."""

_NUMBERS = (b"\xff" * 9 + b"\x01", b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x08", b"\x00", b"\x7f", b"\x80")
_TIMEOUT_S = 30.0


class Side(NamedTuple):
    """One service: its name, the path of its link's method, and valid messages for it."""

    name: str
    method: str
    kind: ClientKind
    seeds: list[bytes]


def sides() -> list[Side]:
    """The draft's and the target's."""
    rows = [Item(11, list(range(1, 30))), Item(12, [7] * 12)]
    opens = tuple(open_stream(row.stream_id, row.tokens) for row in rows)
    hello = Hello(coordinator_id=b"fuzz coordinator", epoch=1)
    asked = propose(rows, 4, opens=opens, closed=(13, 14))
    checked = VerifyBatch(items=items_of(rows), slots=no_slots(2), runs=np.array([3, 3], np.uint16), opens=opens)
    return [
        Side(
            "draft",
            "/outrider.v1.DraftService/Propose",
            PROPOSE,
            [_hello(draft_pb2.ProposeRequest, hello), PROPOSE.write(asked).SerializeToString()],
        ),
        Side(
            "target",
            "/outrider.v1.TargetService/Verify",
            VERIFY,
            [_hello(target_pb2.VerifyRequest, hello), VERIFY.write(checked).SerializeToString()],
        ),
    ]


def mutated(dice: random.Random, seeds: list[bytes]) -> bytes:
    """One malformed message."""
    data = bytearray(dice.choice(seeds))
    for _ in range(dice.choice((1, 1, 1, 2, 4, 16))):
        at = dice.randrange(len(data) + 1)
        length = dice.choice((1, 1, 2, 4, 8, 64))
        match dice.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << dice.randrange(8)
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length]
            case 3:
                data[at : at + dice.choice((0, 1, 4))] = dice.choice(_NUMBERS)
            case 4:
                data[at:at] = dice.randbytes(length)
            case 5:
                other = dice.choice(seeds)
                cut = dice.randrange(len(other) + 1)
                data[at:] = other[cut:]
            case _:
                del data[at:]
    return bytes(data)


async def fuzz(port: int, side: Side, count: int, seed: int) -> Counter[str]:
    """Sends `count` malformed messages over links that are opened again whenever one ends.

    Every other one is the first message of its link, in the place of a greeting; the rest follow a greeting.

    Returns:
        How often links ended with which status, and "answered" for messages after which they went on.

    Raises:
        AssertionError: a status that is no clear refusal; TimeoutError: no end and no answer.
    """
    dice, outcomes, epoch = random.Random(seed), Counter[str](), 0
    async with channel_to(port) as channel:
        method = channel.stream_stream(side.method, request_serializer=lambda data: data, response_deserializer=bytes)
        call: Any = None
        for number in range(count):
            if call is None:
                call = method()
                if number % 2:
                    epoch += 1
                    hello = Hello(coordinator_id=seed.to_bytes(16, "big"), epoch=epoch)
                    await call.write(_hello(side.kind.request, hello))
                    async with asyncio.timeout(_TIMEOUT_S):
                        await call.read()
            message = mutated(dice, side.seeds)
            try:
                await call.write(message)
                ended = await _settled(call, dice)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                ended = True
            if not ended:
                outcomes["answered"] += 1
                continue
            async with asyncio.timeout(_TIMEOUT_S):
                code = await call.code()
            if await call.details() == _CLIENT_LATE:
                outcomes["hung up too late"] += 1
            else:
                assert code in ALLOWED, (code, await call.details(), message.hex())
                outcomes[code.name] += 1
            call = None
        if call is not None:
            call.cancel()
    return outcomes


async def _settled(call: Any, dice: random.Random) -> bool:
    """Whether the link ended; a link that goes on is hung up on now and then, so that there are many of both."""
    if dice.random() < 0.5:
        await call.done_writing()
        async with asyncio.timeout(_TIMEOUT_S):
            while await call.read() is not grpc.aio.EOF:
                pass
        return True
    return bool(call.done())


async def is_well(port: int) -> bool:
    """Whether the service says that it serves."""
    async with channel_to(port) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def open_streams(port: int, side: Side) -> int:
    """Streams that the service holds."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        stub = {"draft": draft_pb2_grpc.DraftServiceStub, "target": target_pb2_grpc.TargetServiceStub}[side.name](
            channel
        )
        return int((await stub.GetInfo(common_pb2.GetInfoRequest())).info.open_streams)


def _hello(request: Any, hello: Hello) -> bytes:
    return bytes(request(hello=hello_to_pb(hello)).SerializeToString())


@contextmanager
def _running(side: Side, folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    model = "ngram" if side.name == "draft" else "stub:markov"
    with service(f"{side.name}_service", model, folder) as part:
        yield part.port, psutil.Process(part.process.pid)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="messages per service")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    for side in sides():
        with tempfile.TemporaryDirectory() as folder, _running(side, Path(folder)) as (port, process):
            began = time.monotonic()
            while not asyncio.run(is_well(port)):
                time.sleep(0.2)
            outcomes, sizes = Counter[str](), []
            for part in range(10):
                outcomes += asyncio.run(fuzz(port, side, given.count // 10, given.seed * 1_000 + part))
                sizes.append(process.memory_info().rss / 1e6)
                print(f"{side.name}: {(part + 1) * given.count // 10} messages, {sizes[-1]:.0f} MB", flush=True)
            well = asyncio.run(is_well(port))
            print(f"{side.name}: {dict(outcomes)}, serving: {well}, {time.monotonic() - began:.0f} s")
            if not well or sizes[-1] - sizes[4] > 20:
                print(f"{side.name}: not well, or memory grew: {[round(size) for size in sizes]}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
