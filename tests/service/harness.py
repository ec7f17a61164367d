"""What the service tests share: servers inside the test's process on a free port, and a bare client of a link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import grpc
import numpy as np

from draft_service.config import DraftConfig
from draft_service.service import DraftService
from outrider.features import NO_FEATURES, Features
from outrider.rpc import codec
from outrider.rpc.hello import Hello, HelloReply, hello_reply_from_pb, hello_to_pb
from outrider.rpc.options import channel_options
from outrider.sampling import SamplingParams
from outrider.seam import Items, ProposalBatch, ProposeBatch, Slots, StreamOpen, VerdictBatch, VerifyBatch, prefix_hash
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

ANSWER_WITHIN_S = 30.0
"""How long a test waits for a message before it fails; far above what a loaded machine needs."""

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class ClientKind(NamedTuple):
    """One link's client side: how to reach it and how its messages read."""

    method: Callable[[grpc.aio.Channel], Any]
    request: Callable[..., Any]
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


PROPOSE = ClientKind(
    lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Propose,
    draft_pb2.ProposeRequest,
    codec.propose_to_pb,
    codec.proposal_from_pb,
)
VERIFY = ClientKind(
    lambda channel: target_pb2_grpc.TargetServiceStub(channel).Verify,
    target_pb2.VerifyRequest,
    codec.verify_to_pb,
    codec.verdict_from_pb,
)


class RawLink(Generic[Request, Reply]):
    """A link without a coordinator behind it: sends what the test says, returns what comes."""

    def __init__(self, kind: ClientKind, channel: grpc.aio.Channel) -> None:
        self._kind = kind
        self.call = kind.method(channel)()
        self.reply: HelloReply | None = None
        self._sending = asyncio.Lock()  # gRPC takes one write of a call at a time

    async def greet(self, hello: Hello) -> HelloReply:
        await self.call.write(self._kind.request(hello=hello_to_pb(hello)))
        message = await self.read_message()
        self.reply = hello_reply_from_pb(message.hello)
        return self.reply

    async def send(self, batch: Request) -> None:
        async with self._sending:
            await self.call.write(self._kind.write(batch))

    async def receive(self) -> Reply:
        """The next reply batch that holds items; keepalive messages are skipped."""
        while True:
            message = await self.read_message()
            if message.replies.stream_ids:
                return self._kind.read(message)

    async def read_message(self) -> Any:
        """The next message, whatever it is; fails if the link has ended."""
        message = await asyncio.wait_for(self.call.read(), ANSWER_WITHIN_S)
        if message is grpc.aio.EOF:
            raise AssertionError(f"the link ended: {await self.call.code()} {await self.call.details()}")
        return message

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        """How the link ended."""
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await self.call.code(), await self.call.details()


@asynccontextmanager
async def channel_to(port: int) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        yield channel


@asynccontextmanager
async def draft_service(model: str, *, lease_s: float = 10.0, **fields: Any) -> AsyncIterator[int]:
    """A draft service that is ready; yields its port."""
    service = DraftService(DraftConfig(model=model, port=0, **fields), lease_s)
    port = await service.start()
    try:
        await service.ready()
        yield port
    finally:
        await service.stop()


@asynccontextmanager
async def propose_link(
    port: int, *, coordinator_id: bytes = b"test coordinator", epoch: int = 1
) -> AsyncIterator[RawLink[ProposeBatch, ProposalBatch]]:
    """A greeted link to a draft service."""
    async with channel_to(port) as channel:
        link = RawLink[ProposeBatch, ProposalBatch](PROPOSE, channel)
        await link.greet(Hello(coordinator_id=coordinator_id, epoch=epoch))
        yield link
        link.call.cancel()


@asynccontextmanager
async def verify_link(
    port: int, *, coordinator_id: bytes = b"test coordinator", epoch: int = 1
) -> AsyncIterator[RawLink[VerifyBatch, VerdictBatch]]:
    """A greeted link to a target service."""
    async with channel_to(port) as channel:
        link = RawLink[VerifyBatch, VerdictBatch](VERIFY, channel)
        await link.greet(Hello(coordinator_id=coordinator_id, epoch=epoch))
        yield link
        link.call.cancel()


class Item(NamedTuple):
    """One stream's item, from the tokens of the whole stream.

    Attributes:
        stream_id: the stream.
        tokens: all committed tokens.
        base: position of the first token that is sent.
        generation: of the item.
    """

    stream_id: int
    tokens: list[int]
    base: int = 0
    generation: int = 0


def items_of(rows: list[Item]) -> Items:
    sent = [row.tokens[row.base :] for row in rows]
    return Items(
        stream_ids=np.array([row.stream_id for row in rows], np.uint64),
        generations=np.array([row.generation for row in rows], np.uint32),
        committed_lengths=np.array([len(row.tokens) for row in rows], np.uint32),
        bases=np.array([row.base for row in rows], np.uint32),
        prefix_hashes=np.array([prefix_hash(row.tokens[: row.base]) for row in rows], np.uint64),
        token_counts=np.array([len(tokens) for tokens in sent], np.uint32),
        tokens=np.array([token for tokens in sent for token in tokens], np.uint32),
    )


def open_stream(stream_id: int, prompt: list[int], params: SamplingParams | None = None, **fields: Any) -> StreamOpen:
    return StreamOpen(
        stream_id=stream_id, prompt_length=len(prompt), params=params or SamplingParams(max_tokens=1_000), **fields
    )


def propose(
    rows: list[Item],
    slots: int | list[int],
    *,
    opens: tuple[StreamOpen, ...] = (),
    deadline_ms: int = 0,
    least_survival: float = 0.0,
    closed: tuple[int, ...] = (),
    features: Features = NO_FEATURES,
) -> ProposeBatch:
    wanted = [slots] * len(rows) if isinstance(slots, int) else slots
    return ProposeBatch(
        items=items_of(rows),
        slots=np.array(wanted, np.uint8),
        deadlines_ms=np.full(len(rows), deadline_ms, np.uint16),
        least_survivals=np.full(len(rows), round(65_535 * least_survival), np.uint16),
        opens=opens,
        closed=np.array(closed, np.uint64),
        features=features,
    )


def no_slots(items: int) -> Slots:
    """The slots of a batch in which nothing was drafted."""
    return Slots(
        per_item=np.zeros(items, np.uint8),
        draft_ids=np.empty(0, np.uint32),
        own_counts=np.empty(0, np.uint16),
        support_sizes=np.empty(0, np.uint16),
        q_ids=np.empty(0, np.uint32),
        q_counts=np.empty(0, np.uint16),
        dense_q=np.empty(0, np.float32),
    )


def drafted(batch: ProposalBatch) -> dict[int, list[int]]:
    """Drafted ids by stream."""
    ends = np.cumsum(batch.slots.per_item, dtype=np.int64)
    parts = np.split(batch.slots.draft_ids, ends[:-1]) if len(ends) else []
    return {int(stream_id): part.tolist() for stream_id, part in zip(batch.replies.stream_ids, parts, strict=True)}
