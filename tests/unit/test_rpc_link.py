"""The service side of a link, against a stand-in for the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest

from outrider.errors import Mismatch, Status
from outrider.rpc import codec, hello, session
from outrider.rpc.hello import Hello, hello_to_pb, negotiate
from outrider.rpc.link import Attached, Delivery, Detached, LinkHost, LinkKind
from outrider.rpc.merge import merge
from outrider.rpc.options import DRAFT_SERVICE_NAME, message_limit
from outrider.rpc.server import Server
from outrider.seam import ProposalBatch, Replies, Timings
from outrider.v1 import draft_pb2, draft_pb2_grpc
from tests.service.harness import PROPOSE, Item, RawLink, channel_to, no_slots, open_stream, propose, propose_link

CREDIT = 4
LIMIT = message_limit(max_num_seqs=1, max_model_len=64, max_slots=4, vocab_rows=8)
KIND = LinkKind(
    read=codec.propose_from_pb,
    write=codec.proposal_to_pb,
    refuse=lambda replies: ProposalBatch(replies=replies, slots=no_slots(len(replies))),
    response=draft_pb2.ProposeResponse,
)


def answers(delivery: Delivery[Any, Any], indices: list[int]) -> ProposalBatch:
    items = delivery.batch.items
    replies = Replies(
        stream_ids=items.stream_ids[indices],
        generations=items.generations[indices],
        committed_lengths=items.committed_lengths[indices],
        statuses=np.zeros(len(indices), np.uint8),
        cached_lengths=np.zeros(len(indices), np.uint32),
    )
    return ProposalBatch(replies=replies, slots=no_slots(len(indices)))


class Service(draft_pb2_grpc.DraftServiceServicer):
    """A draft service whose engine is the test: it takes deliveries from a queue and answers when it likes."""

    def __init__(self) -> None:
        self.engine: asyncio.Queue[Any] = asyncio.Queue()
        self.host = LinkHost(KIND, self.engine.put_nowait, instance_id="i", credit=CREDIT, max_slots=4, lease_s=5.0)

    async def Propose(self, request_iterator: Any, context: grpc.aio.ServicerContext) -> None:
        await self.host.serve(request_iterator, context)

    async def next(self, kind: type) -> Any:
        message = await asyncio.wait_for(self.engine.get(), 30)
        assert isinstance(message, kind), message
        return message


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Service, int]]:
    service = Service()
    server = Server(DRAFT_SERVICE_NAME, message_limit=LIMIT)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server.grpc)
    port = await server.start("127.0.0.1", 0)
    try:
        yield service, port
    finally:
        await server.stop()


def rows(n: int, first: int = 0) -> list[Item]:
    return [Item(first + index, [1, 2, 3]) for index in range(n)]


async def test_the_greeting_says_what_the_service_grants() -> None:
    """Guards the coordinator's knowledge of restarts (instance id), leases and credit."""
    async with serving() as (service, port), propose_link(port) as link:
        assert link.reply is not None
        assert (link.reply.instance_id, link.reply.lease_ms, link.reply.credit) == ("i", 5_000, CREDIT)
        attached = await service.next(Attached)
        assert (attached.owner, attached.epoch) == (b"test coordinator", 1)


@pytest.mark.parametrize(
    ("greeting", "code", "named"),
    [
        (draft_pb2.ProposeRequest(), grpc.StatusCode.INVALID_ARGUMENT, "hello"),
        (
            draft_pb2.ProposeRequest(hello=hello_to_pb(Hello(coordinator_id=b"short", epoch=1))),
            grpc.StatusCode.INVALID_ARGUMENT,
            "coordinator_id",
        ),
        (
            draft_pb2.ProposeRequest(
                hello=hello_to_pb(Hello(coordinator_id=bytes(16), epoch=1, protocol_min=7, protocol_max=9))
            ),
            grpc.StatusCode.FAILED_PRECONDITION,
            "upgrade this side",
        ),
    ],
)
async def test_a_bad_greeting_ends_the_link_with_a_reason(
    greeting: draft_pb2.ProposeRequest, code: grpc.StatusCode, named: str
) -> None:
    """Guards against peers that cannot understand each other going on anyway."""
    async with serving() as (_, port), channel_to(port) as channel:
        link: RawLink[Any, Any] = RawLink(PROPOSE, channel)
        await link.call.write(greeting)
        ended = await link.ended()
        assert ended[0] == code
        assert named in ended[1]


def test_the_highest_common_protocol_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rolling upgrades: ranges that overlap must work, and the error must name the older side."""
    monkeypatch.setattr(hello, "PROTOCOL_MIN", 2)
    monkeypatch.setattr(hello, "PROTOCOL_MAX", 4)
    assert negotiate("draft service", 1, 3) == 3
    assert negotiate("draft service", 4, 9) == 4
    with pytest.raises(Mismatch, match="upgrade the draft service"):
        negotiate("draft service", 1, 1)
    with pytest.raises(Mismatch, match="upgrade this side"):
        negotiate("draft service", 5, 9)


async def test_one_message_carries_the_items_of_all_streams_both_ways() -> None:
    """Guards against a message per stream, which does not scale to many streams."""
    async with serving() as (service, port), propose_link(port) as link:
        await service.next(Attached)
        await link.send(propose(rows(4), 2))
        delivery = await service.next(Delivery)
        # Two steps finish in the same turn of the event loop.
        delivery.link.reply(answers(delivery, [0, 1]), 2)
        delivery.link.reply(answers(delivery, [2, 3]), 2)
        assert (await link.receive()).replies.stream_ids.tolist() == [0, 1, 2, 3]


async def test_items_beyond_the_credit_are_answered_at_once() -> None:
    """Guards memory and latency under overload: queues are bounded, and the excess hears so immediately."""
    async with serving() as (service, port), propose_link(port) as link:
        await service.next(Attached)
        await link.send(propose(rows(6), 2))
        refused = await link.receive()
        assert refused.replies.stream_ids.tolist() == [4, 5]
        assert {refused.replies.status(index) for index in range(2)} == {Status.RESOURCE_EXHAUSTED}
        delivery = await service.next(Delivery)
        assert delivery.refused == {4, 5}
        delivery.link.reply(answers(delivery, [0, 1, 2, 3]), 4)
        await link.receive()
        await link.send(propose(rows(4), 2))
        assert not (await service.next(Delivery)).refused


async def test_malformed_columns_end_the_link_and_not_the_process() -> None:
    """Guards the service against a broken peer: the column is named, and the next link works."""
    async with serving() as (_, port):
        async with propose_link(port) as link:
            message = codec.propose_to_pb(propose(rows(2), 2))
            message.items.generations = message.items.generations[:-1]
            await link.call.write(message)
            code, details = await link.ended()
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert "generations" in details
        async with propose_link(port, epoch=2) as link:
            assert link.reply is not None


async def test_a_bad_item_is_answered_in_its_status_column() -> None:
    """Guards the other streams of a link against one bad item."""
    async with serving() as (service, port), propose_link(port) as link:
        await service.next(Attached)
        await link.send(propose(rows(2), [1, 9]))
        refused = await link.receive()
        assert refused.replies.status(0) == Status.INVALID_ARGUMENT
        assert refused.replies.errors[0].startswith("slots:")
        assert (await service.next(Delivery)).refused == {1}


async def test_an_idle_link_carries_empty_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against middleboxes and peers that take a silent link for a dead one."""
    monkeypatch.setattr(session, "IDLE_BATCH_INTERVAL_S", 0.01)
    async with serving() as (_, port), propose_link(port) as link:
        for _ in range(3):
            assert await link.read_message() == draft_pb2.ProposeResponse()


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_the_end_of_a_link_reaches_the_engine(how: str) -> None:
    """Guards the streams' memory: without a detach no lease ever starts."""
    async with serving() as (service, port), propose_link(port) as link:
        await service.next(Attached)
        if how == "cancelled":
            link.call.cancel()
        else:
            await link.call.done_writing()
        detached = await service.next(Detached)
        assert (detached.owner, detached.epoch) == (b"test coordinator", 1)


async def test_a_newer_link_takes_over_and_an_older_one_is_refused() -> None:
    """Guards against two links of one coordinator: the older one's messages must not count any more."""
    async with serving() as (service, port), propose_link(port, epoch=5) as old:
        await service.next(Attached)
        async with propose_link(port, epoch=6):
            assert (await service.next(Attached)).epoch == 6
            assert (await old.ended())[0] == grpc.StatusCode.ABORTED
            async with channel_to(port) as channel:
                stale: RawLink[Any, Any] = RawLink(PROPOSE, channel)
                await stale.call.write(
                    draft_pb2.ProposeRequest(hello=hello_to_pb(Hello(coordinator_id=b"test coordinator", epoch=6)))
                )
                code, details = await stale.ended()
                assert code == grpc.StatusCode.INVALID_ARGUMENT
                assert "link_epoch" in details
        # The only detach is the newer link's own.
        assert (await service.next(Detached)).epoch == 6
        assert service.engine.empty()


async def test_replies_to_a_link_that_ended_are_dropped() -> None:
    """Guards the engine thread: a coordinator that went away must not raise there."""
    async with serving() as (service, port), propose_link(port) as link:
        await service.next(Attached)
        await link.send(propose(rows(1), 1))
        delivery = await service.next(Delivery)
        link.call.cancel()
        await service.next(Detached)
        delivery.link.reply(answers(delivery, [0]), 1)


async def test_draining_lets_open_streams_finish_and_refuses_new_links() -> None:
    """Guards graceful shutdown: neither cut streams while there is time, nor waiting for links that are idle."""
    async with serving() as (service, port), propose_link(port) as link:
        await service.next(Attached)
        stream = open_stream(1, [1, 2, 3])
        await link.send(propose([Item(1, [1, 2, 3])], 1, opens=(stream,)))
        delivery = await service.next(Delivery)
        draining = asyncio.create_task(service.host.drain(30.0))
        await asyncio.sleep(0)
        async with channel_to(port) as channel:
            late: RawLink[Any, Any] = RawLink(PROPOSE, channel)
            with suppress(grpc.aio.AioRpcError):  # it may be refused before its first message has left
                await late.call.write(
                    draft_pb2.ProposeRequest(hello=hello_to_pb(Hello(coordinator_id=b"another one here", epoch=1)))
                )
            assert (await late.ended())[0] == grpc.StatusCode.UNAVAILABLE
        delivery.link.reply(answers(delivery, [0]), 1)
        await link.receive()
        assert not draining.done()
        await link.send(propose([], 0, closed=(1,)))
        assert (await link.ended())[0] == grpc.StatusCode.UNAVAILABLE
        await draining


def test_merged_batches_keep_items_and_messages_together() -> None:
    """Guards against an error message that points to another stream's item after merging."""

    def batch(stream_ids: list[int], errors: dict[int, str], forward_ms: float) -> ProposalBatch:
        n = len(stream_ids)
        replies = Replies(
            stream_ids=np.array(stream_ids, np.uint64),
            generations=np.zeros(n, np.uint32),
            committed_lengths=np.zeros(n, np.uint32),
            statuses=np.zeros(n, np.uint8),
            cached_lengths=np.zeros(n, np.uint32),
            errors=errors,
        )
        return ProposalBatch(replies=replies, slots=no_slots(n), timings=Timings(forward_ms=forward_ms))

    merged = merge([batch([7, 8], {1: "eight"}, 1.0), batch([9], {0: "nine"}, 2.0)])
    assert merged.replies.stream_ids.tolist() == [7, 8, 9]
    assert merged.replies.errors == {1: "eight", 2: "nine"}
    assert merged.timings.forward_ms == 2.0


def test_credit_that_goes_back_does_not_hide_the_times_of_a_step() -> None:
    """Guards step times, from which costs are learnt, against a batch without a step in the same message."""
    nothing = Replies(
        stream_ids=np.zeros(0, np.uint64),
        generations=np.zeros(0, np.uint32),
        committed_lengths=np.zeros(0, np.uint32),
        statuses=np.zeros(0, np.uint8),
        cached_lengths=np.zeros(0, np.uint32),
        errors={},
    )
    first, second, credit = (
        ProposalBatch(replies=nothing, slots=no_slots(0), timings=Timings(forward_ms=ms)) for ms in (1.0, 2.0, 0.0)
    )
    assert merge([first, second, credit]).timings.forward_ms == 2.0
    assert merge([credit, credit]).timings == Timings()
