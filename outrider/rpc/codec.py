"""Batches to and from protobuf. Structure is validated here, once; content (ids, counts, prefixes) where it is used.

A message whose columns contradict each other is unreadable as a whole and raises. What is wrong with a single item or
stream is reported beside the batch, so that the other items of the message go on.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidArgument
from outrider.rpc.columns import F32, U8, U16, U32, U64, read, total, write
from outrider.rpc.feature_codec import features_from, features_from_pb, features_to_pb, request_to_pb
from outrider.rpc.logprob_codec import logprobs_from_pb, logprobs_to_pb
from outrider.rpc.parts_codec import (
    items_from_pb,
    items_to_pb,
    replies_from_pb,
    replies_to_pb,
    slots_from_pb,
    slots_to_pb,
)
from outrider.rpc.stream_codec import open_from_pb, open_to_pb
from outrider.seam import Items, ProposalBatch, ProposeBatch, StreamOpen, Timings, VerdictBatch, VerifyBatch
from outrider.v1 import common_pb2, draft_pb2, target_pb2

Batch = TypeVar("Batch", ProposeBatch, VerifyBatch)


class Limits(NamedTuple):
    """What a service takes in one request message."""

    max_items: int
    max_slots: int


class Request(NamedTuple, Generic[Batch]):
    """A request batch as read, and the items that must not reach the engine.

    Attributes:
        batch: all items, `refused` ones included, so that indices mean what the sender means by them.
        refused: item index -> what is wrong with it.
    """

    batch: Batch
    refused: dict[int, InvalidArgument]


def propose_to_pb(batch: ProposeBatch) -> draft_pb2.ProposeRequest:
    return draft_pb2.ProposeRequest(
        opens=[open_to_pb(stream) for stream in batch.opens],
        closed_stream_ids=write(batch.closed, U64),
        items=items_to_pb(batch.items),
        slots=write(batch.slots, U8),
        deadlines_ms=write(batch.deadlines_ms, U16),
        least_survivals=write(batch.least_survivals, U16) if batch.least_survivals.any() else b"",
        features=features_to_pb(batch.features),
    )


def propose_from_pb(message: draft_pb2.ProposeRequest, limits: Limits) -> Request[ProposeBatch]:
    """
    Raises:
        InvalidArgument: naming the column that contradicts the others or a limit.
    """
    items = items_from_pb(message.items, limits.max_items)
    opens, bad_streams = _opens_from_pb(message.opens)
    batch = ProposeBatch(
        items=items,
        slots=read("slots", message.slots, U8, len(items)),
        deadlines_ms=read("deadlines_ms", message.deadlines_ms, U16, len(items)),
        least_survivals=read("least_survivals", message.least_survivals, U16, len(items))
        if message.least_survivals
        else np.zeros(len(items), np.uint16),
        opens=opens,
        closed=read("closed_stream_ids", message.closed_stream_ids, U64),
        features=features_from_pb(message.features),
    )
    return Request(batch, _refused(items, batch.slots, bad_streams, limits))


def verify_to_pb(batch: VerifyBatch) -> target_pb2.VerifyRequest:
    request = batch.feature_request
    return target_pb2.VerifyRequest(
        opens=[open_to_pb(stream) for stream in batch.opens],
        closed_stream_ids=write(batch.closed, U64),
        items=items_to_pb(batch.items),
        slots=slots_to_pb(batch.slots),
        runs=write(batch.runs, U16),
        features_from=write(batch.features_from, U32) if request is not None else b"",
        feature_request=request_to_pb(request) if request is not None else None,
    )


def verify_from_pb(message: target_pb2.VerifyRequest, limits: Limits) -> Request[VerifyBatch]:
    """
    Raises:
        InvalidArgument: naming the column that contradicts the others or a limit.
    """
    items = items_from_pb(message.items, limits.max_items)
    opens, bad_streams = _opens_from_pb(message.opens)
    wanted_from, feature_request = features_from(message, len(items))
    batch = VerifyBatch(
        items=items,
        slots=slots_from_pb(message.slots, len(items)),
        runs=read("runs", message.runs, U16, len(items)),
        opens=opens,
        closed=read("closed_stream_ids", message.closed_stream_ids, U64),
        features_from=wanted_from,
        feature_request=feature_request,
    )
    return Request(batch, _refused(items, batch.slots.per_item, bad_streams, limits))


def proposal_to_pb(batch: ProposalBatch) -> draft_pb2.ProposeResponse:
    return draft_pb2.ProposeResponse(
        replies=replies_to_pb(batch.replies), slots=slots_to_pb(batch.slots), timings=timings_to_pb(batch.timings)
    )


def proposal_from_pb(message: draft_pb2.ProposeResponse) -> ProposalBatch:
    """
    Raises:
        InvalidArgument: naming the column that contradicts the others.
    """
    replies = replies_from_pb(message.replies)
    return ProposalBatch(
        replies=replies, slots=slots_from_pb(message.slots, len(replies)), timings=timings_from_pb(message.timings)
    )


def verdict_to_pb(batch: VerdictBatch) -> target_pb2.VerifyResponse:
    return target_pb2.VerifyResponse(
        replies=replies_to_pb(batch.replies),
        slots_done=write(batch.slots_done, U8),
        cuts=write(batch.cuts, U8),
        p=write(batch.p, F32),
        emit=write(batch.emit, U32),
        bonus=write(batch.bonus, U32),
        dense_p=write(batch.dense_p, F32),
        timings=timings_to_pb(batch.timings),
        features=features_to_pb(batch.features),
        logprobs=logprobs_to_pb(batch.logprobs),
        prompt_logprobs=logprobs_to_pb(batch.prompt_logprobs),
    )


def verdict_from_pb(message: target_pb2.VerifyResponse) -> VerdictBatch:
    """
    Raises:
        InvalidArgument: naming the column that contradicts the others.
    """
    replies = replies_from_pb(message.replies)
    slots_done = read("slots_done", message.slots_done, U8, len(replies))
    slots = total(slots_done)
    return VerdictBatch(
        replies=replies,
        slots_done=slots_done,
        cuts=read("cuts", message.cuts, U8, len(replies)),
        p=read("p", message.p, F32, slots),
        emit=read("emit", message.emit, U32, slots),
        bonus=read("bonus", message.bonus, U32, len(replies)),
        dense_p=read("dense_p", message.dense_p, F32),
        timings=timings_from_pb(message.timings),
        features=features_from_pb(message.features),
        logprobs=logprobs_from_pb(message.logprobs, "logprobs"),
        prompt_logprobs=logprobs_from_pb(message.prompt_logprobs, "prompt_logprobs"),
    )


def timings_to_pb(timings: Timings) -> common_pb2.Timings:
    return common_pb2.Timings(
        queue_ms=timings.queue_ms,
        forward_ms=timings.forward_ms,
        sample_ms=timings.sample_ms,
        total_ms=timings.total_ms,
        step_streams=timings.step_streams,
        step_tokens=timings.step_tokens,
    )


def timings_from_pb(message: common_pb2.Timings) -> Timings:
    return Timings(
        queue_ms=message.queue_ms,
        forward_ms=message.forward_ms,
        sample_ms=message.sample_ms,
        total_ms=message.total_ms,
        step_streams=message.step_streams,
        step_tokens=message.step_tokens,
    )


def _opens_from_pb(messages: list[common_pb2.StreamOpen]) -> tuple[tuple[StreamOpen, ...], dict[int, InvalidArgument]]:
    opens, bad_streams = [], {}
    for message in messages:
        try:
            opens.append(open_from_pb(message))
        except InvalidArgument as error:
            bad_streams[message.stream_id] = error
    return tuple(opens), bad_streams


def _refused(
    items: Items, slots: NDArray[np.uint8], bad_streams: dict[int, InvalidArgument], limits: Limits
) -> dict[int, InvalidArgument]:
    """Item index -> what is wrong with that item alone."""
    refused: dict[int, InvalidArgument] = {}
    ends = items.bases.astype(np.int64) + items.token_counts
    for index in np.flatnonzero((ends != items.committed_lengths) | (items.committed_lengths == 0)).tolist():
        committed = int(items.committed_lengths[index])
        problem = f"{committed} is not base + tokens sent = {ends[index]}" if committed else "must be at least 1"
        refused[index] = InvalidArgument("committed_lengths", problem)
    for index in np.flatnonzero(slots > limits.max_slots).tolist():
        refused[index] = InvalidArgument("slots", f"{slots[index]} slots, more than the {limits.max_slots} allowed")
    if bad_streams:
        for index, stream_id in enumerate(items.stream_ids.tolist()):
            if stream_id in bad_streams:
                refused[index] = bad_streams[stream_id]
    return refused
