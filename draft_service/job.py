"""Job: one item being drafted; and the columns that finished jobs make."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.distribution import TOTAL, CountRow
from outrider.errors import Status
from outrider.seam import NO_NOTE, Note, ProposalBatch, Replies, Slots, StreamOpen, Timings

_NO_U16 = np.empty(0, np.uint16)
_NO_U32 = np.empty(0, np.uint32)
_NO_F32 = np.empty(0, np.float32)


class Slot(NamedTuple):
    """A drafted token and the q it was drawn from.

    Attributes:
        token: the drafted id.
        own_count: its count in q.
        support: q in counts; None for a one-hot q, and in the dense form.
        dense: float32 [vocab], the whole row, in the dense form only.
        confidence: probability of the draft's first choice where that is what is proposed, else 1. A fact of q as a
            distribution, whatever was drawn from it.
    """

    token: int
    own_count: int = TOTAL
    support: CountRow | None = None
    dense: NDArray[np.float32] | None = None
    confidence: float = 1.0


@dataclass(slots=True, eq=False)
class Job:
    """An item between its arrival and its answer.

    Attributes:
        opened: the stream's parameters.
        generation: of the item, for the echo.
        committed: committed length at the start of the round, for the echo and the noise counters.
        wanted: slots asked for; 0 brings the KV up to date.
        link: where to answer.
        owner: the coordinator.
        arrived_s: monotonic time of arrival.
        least_survival: chance of surviving below which a slot is not drafted; 0 never stops.
        survival: chance that all slots so far are accepted, as the draft sees it.
        deadline_s: monotonic time after which what is done is returned.
        slots: what was drafted so far.
        started_s: when the first step with this job began.
        forward_ms, sample_ms: its share of time so far.
        step_streams, step_tokens: of its latest step.
    """

    opened: StreamOpen
    generation: int
    committed: int
    wanted: int
    link: Any
    owner: bytes
    arrived_s: float
    deadline_s: float = math.inf
    least_survival: float = 0.0
    survival: float = 1.0
    slots: list[Slot] = field(default_factory=list)
    started_s: float | None = None
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    step_streams: int = 0
    step_tokens: int = 0

    @property
    def stream_id(self) -> int:
        return self.opened.stream_id

    def timings(self, now_s: float) -> Timings:
        """Where this job's time went until `now_s`."""
        return Timings(
            queue_ms=((self.started_s or now_s) - self.arrived_s) * 1_000,
            forward_ms=self.forward_ms,
            sample_ms=self.sample_ms,
            total_ms=(now_s - self.arrived_s) * 1_000,
            step_streams=self.step_streams,
            step_tokens=self.step_tokens,
        )


class Answer(NamedTuple):
    """What goes back for one item."""

    stream_id: int
    generation: int
    committed: int
    cached: int
    slots: Rows[Slot] = ()
    status: Status = Status.OK
    error: str = ""
    note: Note = NO_NOTE


def to_batch(answers: Rows[Answer], timings: Timings) -> ProposalBatch:
    """The reply batch of these answers, in order."""
    slots = [slot for answer in answers for slot in answer.slots]
    supports = [slot.support for slot in slots if slot.support is not None]
    dense = [slot.dense for slot in slots if slot.dense is not None]
    return ProposalBatch(
        replies=Replies(
            stream_ids=np.array([answer.stream_id for answer in answers], np.uint64),
            generations=np.array([answer.generation for answer in answers], np.uint32),
            committed_lengths=np.array([answer.committed for answer in answers], np.uint32),
            statuses=np.array([answer.status for answer in answers], np.uint8),
            cached_lengths=np.array([answer.cached for answer in answers], np.uint32),
            errors={index: answer.error for index, answer in enumerate(answers) if answer.error},
            notes={index: answer.note for index, answer in enumerate(answers) if answer.note is not NO_NOTE},
        ),
        slots=Slots(
            per_item=np.array([len(answer.slots) for answer in answers], np.uint8),
            draft_ids=np.array([slot.token for slot in slots], np.uint32),
            own_counts=np.array([slot.own_count - 1 for slot in slots], np.uint16),
            support_sizes=np.array([len(slot.support.ids) if slot.support else 0 for slot in slots], np.uint16),
            q_ids=np.concatenate([support.ids for support in supports]) if supports else _NO_U32,
            q_counts=_minus_one(supports),
            dense_q=np.concatenate(dense) if dense else _NO_F32,
        ),
        timings=timings,
    )


def _minus_one(supports: Rows[CountRow]) -> NDArray[np.uint16]:
    if not supports:
        return _NO_U16
    counts = np.concatenate([support.counts for support in supports])
    return (counts - 1).astype(np.uint16)
