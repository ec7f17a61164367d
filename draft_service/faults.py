"""Faults on purpose: what `stub:bad?kind=...` does to proposals on their way out, to test that nobody else minds.

nan, inf   q is no distribution (the counts' sum is off; in the dense form, rows hold NaN or infinity)
negative   drafted ids are -1, a filler that must never be used as an index
oov        drafted ids lie beyond any vocabulary
empty      no slots
short      one slot fewer than asked for
late       proposals leave `ms` later
stale      the echo names the round before
dup        every proposal leaves twice
die        the process ends without a word
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from draft_service.intake import ReplyTo
from outrider.seam import ProposalBatch, Slots

_FILLER = 0xFFFFFFFF
_BEYOND = 0x7FFFFFF0


class Faults:
    """Sends a proposer's batches, spoilt from the `after`-th proposal on.

    Args:
        kind: one of the faults above.
        after: proposals (items with slots) that pass unharmed, over all links.
        late_ms: delay of `late`.
    """

    def __init__(self, kind: str, after: int, late_ms: float) -> None:
        self._kind = kind
        self._healthy_left = after
        self._late_s = late_ms / 1_000

    def send(self, link: ReplyTo, batch: ProposalBatch, answered: int) -> None:
        """What `link.reply(batch, answered)` would do, spoilt. A batch without proposals passes."""
        reply = link.reply
        proposals = int(np.count_nonzero(batch.slots.per_item))
        if self._healthy_left >= proposals:
            self._healthy_left -= proposals
            reply(batch, answered)
            return
        self._healthy_left = 0
        if self._kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._kind == "late":
            timer = threading.Timer(self._late_s, reply, (batch, answered))
            timer.daemon = True
            timer.start()
        elif self._kind == "dup":
            reply(batch, answered)
            reply(batch, 0)
        elif self._kind == "stale":
            replies = batch.replies
            older = np.maximum(replies.committed_lengths, 1) - np.uint32(1)
            reply(replace(batch, replies=replace(replies, committed_lengths=older)), answered)
        else:
            reply(replace(batch, slots=_SPOILERS[self._kind](batch.slots)), answered)


def _poison(value: float) -> Callable[[Slots], Slots]:
    """Counts that sum to anything but 2^16, or rows full of `value`."""

    def poison(slots: Slots) -> Slots:
        dense = np.full_like(slots.dense_q, value)
        if len(slots.dense_q):
            return replace(slots, dense_q=dense)
        ones = np.ones(len(slots.draft_ids), np.uint16)
        return replace(slots, support_sizes=ones, q_ids=slots.draft_ids, q_counts=ones)

    return poison


def _with_ids(first: int) -> Callable[[Slots], Slots]:
    """One-hot slots at ids that no vocabulary has."""

    def spoil(slots: Slots) -> Slots:
        n = len(slots.draft_ids)
        return replace(
            slots,
            draft_ids=np.full(n, first, np.uint32),
            own_counts=np.full(n, 0xFFFF, np.uint16),
            support_sizes=np.zeros(n, np.uint16),
            q_ids=slots.q_ids[:0],
            q_counts=slots.q_counts[:0],
        )

    return spoil


def _keep(count: Callable[[Any], Any]) -> Callable[[Slots], Slots]:
    """The first slots of each item only."""

    def cut(slots: Slots) -> Slots:
        kept = count(slots.per_item.astype(np.int64))
        item = np.repeat(np.arange(len(kept)), slots.per_item)
        first = np.cumsum(slots.per_item, dtype=np.int64) - slots.per_item
        keep = np.arange(len(item)) - first[item] < kept[item]
        support = np.repeat(keep, slots.support_sizes)
        width = len(slots.dense_q) // len(item) if len(item) else 0
        return replace(
            slots,
            per_item=kept.astype(np.uint8),
            draft_ids=slots.draft_ids[keep],
            own_counts=slots.own_counts[keep],
            support_sizes=slots.support_sizes[keep],
            q_ids=slots.q_ids[support],
            q_counts=slots.q_counts[support],
            dense_q=slots.dense_q.reshape(len(item), width)[keep].reshape(-1),
        )

    return cut


_SPOILERS: dict[str, Callable[[Slots], Slots]] = {
    "nan": _poison(float("nan")),
    "inf": _poison(float("inf")),
    "negative": _with_ids(_FILLER),
    "oov": _with_ids(_BEYOND),
    "empty": _keep(np.zeros_like),
    "short": _keep(lambda per_item: np.maximum(per_item - 1, 0)),
}
