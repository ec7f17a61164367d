"""q as integer counts: the one form in which the draft samples it, ships it, and the target tests against it.

A row is a support of rising token ids with counts from 1 to 65,536 that sum to 2^16; q(id) = count / 2^16, a rational
number that both sides hold exactly. Cutting the tail off q and renormalising is exact because the acceptance rule only
asks that x was drawn from the q it is tested against; so x is drawn from the counts, never from what they came from.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.seam import Cut

TOTAL = 1 << 16
"""What the counts of a row sum to."""

_FIRST_ILLEGAL_ID = 1 << 31
"""Ids from here on are negative fillers read as unsigned: no vocabulary has them."""


class CountRow(NamedTuple):
    """One quantised distribution: uint32[k] strictly rising ids, and uint32[k] counts of at least 1 summing to 2^16."""

    ids: NDArray[np.uint32]
    counts: NDArray[np.uint32]


def truncate(probs_desc: NDArray[np.floating], mass: float = 0.995) -> NDArray[np.int64]:
    """How many of the most probable ids to keep: the fewest whose mass reaches ``mass``.

    Args:
        probs_desc: [n, k] the k largest probabilities of each row, falling, out of rows that sum to 1.
        mass: probability to keep.

    Returns:
        int64[n] between 1 and k; never counts a zero beyond the first column; k where the k ids do not reach the mass.
    """
    below = np.cumsum(probs_desc, axis=1, dtype=np.float64) < mass
    positive = np.count_nonzero(probs_desc > 0, axis=1)
    return np.clip(np.count_nonzero(below, axis=1) + 1, 1, np.maximum(positive, 1))


def quantise(ids: NDArray[np.integer], probs: NDArray[np.floating]) -> CountRow:
    """``quantise_rows`` for one row; ids in any order."""
    return quantise_rows(np.asarray(probs)[None], np.asarray(ids)[None])[0]


def quantise_rows(probs: NDArray[np.floating], ids: NDArray[np.integer]) -> list[CountRow]:
    """Rounds each row to counts out of 2^16.

    Floor, at least 1; what is missing goes one by one to the largest fractions (an id raised to 1 has none left), ties
    to the lowest id; what is too much is taken from the largest count (from the next largest, should that one reach 1).
    A row's counts depend on nothing but the row: not on padding, on the order of its ids, or on the rows beside it.

    Args:
        probs: [n, k] weights, not necessarily summing to 1; ids of weight 0 (padding) are left out of the support.
        ids: [n, k] token ids, any order, distinct where the weight is positive.

    Raises:
        ValueError: a weight is negative or not finite, a row has no positive weight, or more than 2^16 of them.
    """
    weights = np.asarray(probs, np.float64)
    if not np.all((weights >= 0) & (weights < np.inf)):
        raise ValueError("weights of q must be finite and not negative")
    sizes = np.count_nonzero(weights, axis=1)
    if not np.all((sizes > 0) & (sizes <= TOTAL)):
        raise ValueError(f"every row of q needs from 1 to {TOTAL} positive weights")

    rising = np.argsort(np.where(weights > 0, ids, np.iinfo(np.int64).max), axis=1)
    weights = np.take_along_axis(weights, rising, axis=1)
    support = np.take_along_axis(np.asarray(ids), rising, axis=1).astype(np.uint32)

    # The running sum, unlike numpy's pairwise one, does not change with the number of padding zeros behind it.
    mass = np.cumsum(weights, axis=1)[:, -1:]
    exact = weights / mass * TOTAL
    used = weights > 0
    counts = np.where(used, np.maximum(np.floor(exact), 1), 0).astype(np.int64)
    missing = TOTAL - counts.sum(axis=1, keepdims=True)
    counts += _to_largest_fractions(np.where(used, exact - counts, -np.inf), missing)
    if np.any(missing < 0):
        counts -= _from_largest_counts(counts, np.maximum(-missing, 0))
    return [
        CountRow(row_ids[:size], row_counts[:size])
        for row_ids, row_counts, size in zip(support, counts.astype(np.uint32), sizes, strict=True)
    ]


def draw(row: CountRow, bits16: int) -> int:
    """The index into the support that a 16-bit integer selects: counts laid end to end in id order."""
    return int(np.searchsorted(np.cumsum(row.counts), bits16, side="right"))


def draw_rows(rows: Sequence[CountRow], bits16: NDArray[np.integer]) -> NDArray[np.int64]:
    """``draw`` for many rows at once: int64[n] indices into each row's support from n integers in [0, 65536)."""
    if not rows:
        return np.empty(0, np.int64)
    sizes = np.array([len(row.ids) for row in rows], np.int64)
    # Every row sums to TOTAL, so row i occupies [i TOTAL, (i + 1) TOTAL) of one running sum.
    ends = np.cumsum(np.concatenate([row.counts for row in rows]), dtype=np.int64)
    targets = np.arange(len(rows)) * TOTAL + np.asarray(bits16, np.int64)
    return np.searchsorted(ends, targets, side="right") - (np.cumsum(sizes) - sizes)


def check_slots(
    support_sizes: NDArray[np.uint16],
    q_ids: NDArray[np.uint32],
    q_counts_minus_one: NDArray[np.uint16],
    draft_ids: NDArray[np.uint32],
    own_counts_minus_one: NDArray[np.uint16],
) -> NDArray[np.uint8]:
    """Judges each slot's declared q, and whether the drafted token can have been drawn from it.

    ``Cut.MALFORMED_Q`` is decided from q alone: ids not strictly rising, a negative filler among them, counts that do
    not sum to 2^16, or a column that ends too early. ``Cut.LYING_DRAFT``: q is well formed, but the drafted token is
    outside its support or its own count is not the support's. An id that the target's vocabulary lacks is no fault:
    p is 0 there and the rule rejects it. A support of size 0 is the one-hot q; its own count must be 2^16.

    Args:
        support_sizes: uint16[s].
        q_ids: uint32[sum of support sizes], the supports end to end.
        q_counts_minus_one: uint16, parallel to ``q_ids``.
        draft_ids: uint32[s].
        own_counts_minus_one: uint16[s] count of the drafted id.

    Returns:
        uint8[s] values of ``Cut``.
    """
    sizes = support_sizes.astype(np.int64)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    held = min(len(q_ids), len(q_counts_minus_one))
    starts, stops = np.minimum(starts, held), np.minimum(ends, held)
    ids, counts_minus_one = q_ids[:held], q_counts_minus_one[:held]
    slot = np.repeat(np.arange(len(sizes)), stops - starts)

    def per_slot(values: NDArray[np.integer] | NDArray[np.bool_]) -> NDArray[np.int64]:
        sums = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
        return sums[stops] - sums[starts]

    illegal = ids >= _FIRST_ILLEGAL_ID
    illegal[1:] |= (ids[1:] <= ids[:-1]) & (slot[1:] == slot[:-1])
    mass = per_slot(counts_minus_one) + (stops - starts)
    drawn = per_slot((ids == draft_ids[slot]) & (counts_minus_one == own_counts_minus_one[slot]))

    one_hot = sizes == 0
    broken = (mass != TOTAL) | (per_slot(illegal) > 0) | (ends > held)
    malformed = np.where(one_hot, draft_ids >= _FIRST_ILLEGAL_ID, broken)
    honest = np.where(one_hot, own_counts_minus_one == TOTAL - 1, drawn == 1)
    cuts = np.where(honest, Cut.NONE, Cut.LYING_DRAFT)
    return np.where(malformed, Cut.MALFORMED_Q, cuts).astype(np.uint8)


def _to_largest_fractions(fractions: NDArray[np.float64], missing: NDArray[np.int64]) -> NDArray[np.bool_]:
    """One more for the ``missing`` [n, 1] largest fractions of each row, ties in id order; else none."""
    # Sorting values and counting ties is several times faster than a stable argsort.
    last = np.take_along_axis(np.sort(fractions, axis=1), fractions.shape[1] - np.maximum(missing, 1), axis=1)
    above, level = fractions > last, fractions == last
    left_for_ties = missing - np.count_nonzero(above, axis=1, keepdims=True)
    return (above & (missing > 0)) | (level & (np.cumsum(level, axis=1) <= left_for_ties))


def _from_largest_counts(counts: NDArray[np.int64], excess: NDArray[np.int64]) -> NDArray[np.int64]:
    """What to take from each count so that ``excess`` [n, 1] is gone, the largest first, leaving at least 1 in each."""
    # Distinct keys, so that equal counts stay in id order whatever the sort.
    width = counts.shape[1]
    order = np.argsort(np.arange(width) - counts * width, axis=1)
    available = np.maximum(np.take_along_axis(counts, order, axis=1) - 1, 0)
    taken_before = np.cumsum(available, axis=1) - available
    taken = np.empty(counts.shape, np.int64)
    np.put_along_axis(taken, order, np.clip(excess - taken_before, 0, available), axis=1)
    return taken
