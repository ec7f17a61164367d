"""Items as rows, and the columns of a batch that many rows make."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from coordinator.feature_side import Wish, first_wanted
from coordinator.state import Proposal
from outrider.features import FeatureBlock, Features
from outrider.seam import F32, U8, U16, U32, Items, ProposeBatch, Slots, StreamOpen, VerifyBatch

U16_MAX = 65_535
NO_U16: U16 = np.empty(0, np.uint16)
NO_U32: U32 = np.empty(0, np.uint32)
NO_F32: F32 = np.empty(0, np.float32)


class Item(NamedTuple):
    """What every request item says: a row of `seam.Items`."""

    stream_id: int
    generation: int
    committed: int
    base: int
    prefix_hash: int
    tokens: Sequence[int]


class ProposeRow(NamedTuple):
    """One item for the draft; `slots` 0 only brings its KV up to date. `least_survival` is a chance from 0 to 1."""

    item: Item
    slots: int
    deadline_ms: int
    open: StreamOpen | None
    least_survival: float = 0.0
    features: FeatureBlock | None = None


class VerifyRow(NamedTuple):
    """One item for the target: a proposal to verify, or `run` plain tokens to draw."""

    item: Item
    proposal: Proposal | None
    run: int
    open: StreamOpen | None
    wish: Wish | None = None


def propose_batch(rows: Sequence[ProposeRow], closed: Sequence[int]) -> ProposeBatch:
    """The message that carries these rows and the ids of streams that ended."""
    return ProposeBatch(
        items=_columns([row.item for row in rows]),
        slots=np.array([row.slots for row in rows], np.uint8),
        deadlines_ms=np.array([row.deadline_ms for row in rows], np.uint16),
        least_survivals=np.array([round(U16_MAX * row.least_survival) for row in rows], np.uint16),
        opens=tuple(row.open for row in rows if row.open is not None),
        closed=np.array(closed, np.uint64),
        features=Features.of([(row.item.stream_id, row.features) for row in rows if row.features is not None]),
    )


def verify_batch(rows: Sequence[VerifyRow], closed: Sequence[int]) -> VerifyBatch:
    """The message that carries these rows and the ids of streams that ended."""
    request = next((row.wish.request for row in rows if row.wish is not None), None)
    wanted_from = [] if request is None else [first_wanted(row.wish, request) for row in rows]
    return VerifyBatch(
        items=_columns([row.item for row in rows]),
        slots=_slots([row.proposal for row in rows]),
        runs=np.array([row.run for row in rows], np.uint16),
        opens=tuple(row.open for row in rows if row.open is not None),
        closed=np.array(closed, np.uint64),
        features_from=np.array(wanted_from, np.uint32),
        feature_request=request,
    )


def split_slots(slots: Slots, cached_lengths: Sequence[int], dense: Sequence[bool]) -> list[Proposal]:
    """The proposal of each item, as views into the columns of the message; nothing is parsed.

    Args:
        slots: of a ProposalBatch.
        cached_lengths: per item.
        dense: per item, whether its slots have rows in `dense_q`.
    """
    per_item = slots.per_item.tolist()
    supports = [0, *np.cumsum(slots.support_sizes, dtype=np.int64).tolist()]
    dense_slots = sum(n for n, is_dense in zip(per_item, dense, strict=True) if is_dense)
    width = len(slots.dense_q) // dense_slots if dense_slots else 0
    proposals, start, row = [], 0, 0
    for n, cached, is_dense in zip(per_item, cached_lengths, dense, strict=True):
        end = start + n
        q_start, q_end = supports[start], supports[end]
        rows = n if is_dense else 0
        proposals.append(
            Proposal(
                draft_ids=slots.draft_ids[start:end],
                own_counts=slots.own_counts[start:end],
                support_sizes=slots.support_sizes[start:end],
                q_ids=slots.q_ids[q_start:q_end],
                q_counts=slots.q_counts[q_start:q_end],
                dense_q=slots.dense_q[row * width : (row + rows) * width],
                draft_cached=cached,
            )
        )
        start, row = end, row + rows
    return proposals


def _columns(items: Sequence[Item]) -> Items:
    return Items(
        stream_ids=np.array([item.stream_id for item in items], np.uint64),
        generations=np.array([item.generation for item in items], np.uint32),
        committed_lengths=np.array([item.committed for item in items], np.uint32),
        bases=np.array([item.base for item in items], np.uint32),
        prefix_hashes=np.array([item.prefix_hash for item in items], np.uint64),
        token_counts=np.array([len(item.tokens) for item in items], np.uint32),
        tokens=np.fromiter(chain.from_iterable(item.tokens for item in items), np.uint32),
    )


def _slots(proposals: Sequence[Proposal | None]) -> Slots:
    drafted = [proposal for proposal in proposals if proposal is not None]
    per_item: U8 = np.array([proposal.slots if proposal else 0 for proposal in proposals], np.uint8)
    if not drafted:
        return Slots(
            per_item=per_item,
            draft_ids=NO_U32,
            own_counts=NO_U16,
            support_sizes=NO_U16,
            q_ids=NO_U32,
            q_counts=NO_U16,
            dense_q=NO_F32,
        )
    return Slots(
        per_item=per_item,
        draft_ids=np.concatenate([proposal.draft_ids for proposal in drafted]),
        own_counts=np.concatenate([proposal.own_counts for proposal in drafted]),
        support_sizes=np.concatenate([proposal.support_sizes for proposal in drafted]),
        q_ids=np.concatenate([proposal.q_ids for proposal in drafted]),
        q_counts=np.concatenate([proposal.q_counts for proposal in drafted]),
        dense_q=np.concatenate([proposal.dense_q for proposal in drafted]),
    )
