"""What the target makes of the drafted slots of an item: how far to feed them, and the q to test each against.

Letters are the paper's (Leviathan et al., arXiv 2211.17192): p target, q draft, x drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.distribution import TOTAL, check_slots
from outrider.rpc.columns import offsets
from outrider.seam import Cut, Slots

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Ints = NDArray[np.int64]

_DENSE_MASS_TOLERANCE = 1e-3
"""How far a dense row of float32 may sum from 1."""

_NO_INTS = np.empty(0, np.int64)
_NO_F64 = np.empty(0, np.float64)


class Proposal(NamedTuple):
    """The slots of one item that are verified.

    Attributes:
        x: drafted tokens to feed, all of them in the target's vocabulary.
        blocked: whether one more slot is answered behind them, whose token the target does not have: p is 0 there, it
            is rejected with certainty, and nothing behind it is ever reached.
        cut: why slots behind these are not verified.
        q_slots: [k] slot of each entry of q, from 0; the one-hot q of a slot is one entry.
        q_ids: [k] token ids, none twice in a slot; they may lie outside the vocabulary.
        q: [k] probabilities.
    """

    x: list[int]
    blocked: bool = False
    cut: Cut = Cut.NONE
    q_slots: Ints = _NO_INTS
    q_ids: Ints = _NO_INTS
    q: F64 = _NO_F64

    @property
    def slots(self) -> int:
        """Slots that are answered."""
        return len(self.x) + self.blocked


PLAIN = Proposal([])


def read_proposals(slots: Slots, dense: Sequence[bool], vocab: int) -> list[Proposal]:
    """Judges the slots of a message and cuts each item at its first unusable one.

    Whether a slot is malformed is decided from its q alone, so cutting there is exact; a drafted token that contradicts
    its q is a lie, for which no law can be promised. A token that the target lacks is neither.

    Args:
        slots: as the draft shipped them.
        dense: [items] whether the item's q travels as whole rows.
        vocab: rows of the target's vocabulary.
    """
    starts = offsets(slots.per_item)
    supports = offsets(slots.support_sizes)
    cuts = check_slots(slots.support_sizes, slots.q_ids, slots.q_counts, slots.draft_ids, slots.own_counts)
    is_dense = np.repeat(np.asarray(dense, np.bool_), slots.per_item)
    if is_dense.any():
        cuts[is_dense] = _check_dense(slots, is_dense)

    proposals = []
    for start, stop in pairwise(starts):
        if start == stop:
            proposals.append(PLAIN)
            continue
        bad = np.flatnonzero(cuts[start:stop])
        end = start + int(bad[0]) if len(bad) else stop
        cut = Cut(int(cuts[end])) if len(bad) else Cut.NONE
        x = slots.draft_ids[start:end]
        lacking = np.flatnonzero(x >= vocab)
        fed = int(lacking[0]) if len(lacking) else len(x)
        blocked = bool(len(lacking))
        answered = fed + blocked
        proposals.append(
            Proposal(x[:fed].tolist(), blocked, Cut.NONE if blocked else cut, *_q(slots, supports, start, answered))
        )
    return proposals


def _q(slots: Slots, supports: list[int], start: int, n: int) -> tuple[Ints, Ints, F64]:
    """q of n slots as entries: slots from 0, ids, probabilities."""
    sizes = slots.support_sizes[start : start + n].astype(np.int64)
    part = slice(supports[start], supports[start + n])
    one_hot = np.flatnonzero(sizes == 0)
    return (
        np.concatenate((np.repeat(np.arange(n), sizes), one_hot)),
        np.concatenate((slots.q_ids[part], slots.draft_ids[start + one_hot])).astype(np.int64),
        np.concatenate(((slots.q_counts[part] + 1.0) / TOTAL, np.ones(len(one_hot)))),
    )


def _check_dense(slots: Slots, is_dense: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """`Cut` of each dense slot: its row is no distribution, or it gives the drafted token no mass."""
    x = slots.draft_ids[is_dense].astype(np.int64)
    width, rest = divmod(len(slots.dense_q), len(x))
    if rest or not width:
        return np.full(len(x), Cut.MALFORMED_Q, np.uint8)
    q = slots.dense_q.reshape(len(x), width)
    with np.errstate(invalid="ignore", over="ignore"):
        mass = q.sum(axis=1, dtype=np.float64)
        sound = (q >= 0).all(axis=1) & (np.abs(mass - 1) <= _DENSE_MASS_TOLERANCE)
        honest = q[np.arange(len(x)), np.minimum(x, width - 1)] > 0
    honest &= x < width
    return np.where(sound, np.where(honest, Cut.NONE, Cut.LYING_DRAFT), Cut.MALFORMED_Q).astype(np.uint8)
