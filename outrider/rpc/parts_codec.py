"""The columns that several messages share (items, slots, replies) to and from protobuf."""

from __future__ import annotations

import numpy as np

from outrider.errors import InvalidArgument, Status
from outrider.rpc.columns import F32, U8, U16, U32, U64, read, total, write
from outrider.seam import Items, Note, Replies, Slots
from outrider.v1 import common_pb2

_STATUSES = np.array(list(Status), np.uint8)


def items_to_pb(items: Items) -> common_pb2.RequestItems:
    return common_pb2.RequestItems(
        stream_ids=write(items.stream_ids, U64),
        generations=write(items.generations, U32),
        committed_lengths=write(items.committed_lengths, U32),
        bases=write(items.bases, U32),
        prefix_hashes=write(items.prefix_hashes, U64),
        token_counts=write(items.token_counts, U32),
        tokens=write(items.tokens, U32),
    )


def items_from_pb(message: common_pb2.RequestItems, max_items: int) -> Items:
    stream_ids = read("stream_ids", message.stream_ids, U64)
    n = len(stream_ids)
    if n > max_items:
        raise InvalidArgument("stream_ids", f"has {n} items, more than the {max_items} of one message")
    token_counts = read("token_counts", message.token_counts, U32, n)
    return Items(
        stream_ids=stream_ids,
        generations=read("generations", message.generations, U32, n),
        committed_lengths=read("committed_lengths", message.committed_lengths, U32, n),
        bases=read("bases", message.bases, U32, n),
        prefix_hashes=read("prefix_hashes", message.prefix_hashes, U64, n),
        token_counts=token_counts,
        tokens=read("tokens", message.tokens, U32, total(token_counts)),
    )


def slots_to_pb(slots: Slots) -> common_pb2.Slots:
    return common_pb2.Slots(
        per_item=write(slots.per_item, U8),
        draft_ids=write(slots.draft_ids, U32),
        own_counts=write(slots.own_counts, U16),
        support_sizes=write(slots.support_sizes, U16),
        q_ids=write(slots.q_ids, U32),
        q_counts=write(slots.q_counts, U16),
        dense_q=write(slots.dense_q, F32),
    )


def slots_from_pb(message: common_pb2.Slots, items: int) -> Slots:
    per_item = read("per_item", message.per_item, U8, items)
    n = total(per_item)
    support_sizes = read("support_sizes", message.support_sizes, U16, n)
    support = total(support_sizes)
    return Slots(
        per_item=per_item,
        draft_ids=read("draft_ids", message.draft_ids, U32, n),
        own_counts=read("own_counts", message.own_counts, U16, n),
        support_sizes=support_sizes,
        q_ids=read("q_ids", message.q_ids, U32, support),
        q_counts=read("q_counts", message.q_counts, U16, support),
        dense_q=read("dense_q", message.dense_q, F32),
    )


def replies_to_pb(replies: Replies) -> common_pb2.ReplyItems:
    return common_pb2.ReplyItems(
        stream_ids=write(replies.stream_ids, U64),
        generations=write(replies.generations, U32),
        committed_lengths=write(replies.committed_lengths, U32),
        statuses=write(replies.statuses, U8),
        cached_lengths=write(replies.cached_lengths, U32),
        errors=[common_pb2.ItemError(index=index, message=text) for index, text in replies.errors.items()],
        notes=[
            common_pb2.ItemNote(index=index, prefix_tokens=note.prefix_tokens, preemptions=note.preemptions)
            for index, note in replies.notes.items()
        ],
    )


def replies_from_pb(message: common_pb2.ReplyItems) -> Replies:
    stream_ids = read("stream_ids", message.stream_ids, U64)
    n = len(stream_ids)
    statuses = read("statuses", message.statuses, U8, n)
    if not np.isin(statuses, _STATUSES).all():
        raise InvalidArgument("statuses", "holds a value that is no status")
    return Replies(
        stream_ids=stream_ids,
        generations=read("generations", message.generations, U32, n),
        committed_lengths=read("committed_lengths", message.committed_lengths, U32, n),
        statuses=statuses,
        cached_lengths=read("cached_lengths", message.cached_lengths, U32, n),
        errors={error.index: error.message for error in message.errors},
        notes={note.index: Note(note.prefix_tokens, note.preemptions) for note in message.notes},
    )
