"""The acceptance rule of speculative decoding, as pure functions.

Sources: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2.
p is the target's distribution, q the draft's, both after every request parameter; gamma tokens are drafted.

A round walks over the drafted tokens x_1 .. x_gamma and accepts x_i when ``u_i q_i(x_i) < p_i(x_i)``. At the first
rejection it emits a token from norm((p_i - q_i)+); if nothing was rejected, a bonus token from p_{gamma+1}.

Two forms compute this. ``dense_round`` holds whole rows and is the textbook. The sparse form splits the work so that
the wire carries O(gamma) bytes: the target draws, *for every slot*, the token that a rejection there would emit
(``inverse_cdf(residual(p, q), emit_u)``, one emit word for all slots and the bonus), and the coordinator compares with
``accepted_counts`` and takes the candidate of the first rejected slot. Both emit the same tokens for the same noise.
Both are exact, because the candidate of slot i is looked at only on the event "slots before i accepted, i rejected",
which depends on the draft's and the accept noise but not on the emit word; and only one candidate is ever looked at.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.distribution import TOTAL

F64 = NDArray[np.float64]
Ints = NDArray[np.int64]


class RoundResult(NamedTuple):
    """Outcome of one round: the first ``accepted`` drafted tokens, then ``token`` (recovered, or the bonus)."""

    accepted: int
    token: int


def dense_round(p: F64, q: F64, x: Ints, u: F64, emit_u: float) -> RoundResult:
    """One round of the standard rule with whole rows in hand.

    Args:
        p: [gamma + 1, vocab] target rows.
        q: [gamma, vocab] draft rows.
        x: [gamma] drafted tokens, x_i drawn from q_i.
        u: [gamma] accept uniforms on [0, 1).
        emit_u: the uniform of the emitted token, on [0, 1).
    """
    gamma = len(x)
    for i in range(gamma):
        if not u[i] * q[i, x[i]] < p[i, x[i]]:
            recovered = inverse_cdf(residual(p[i : i + 1], q[i : i + 1]), np.array([emit_u]))
            return RoundResult(accepted=i, token=int(recovered[0]))
    bonus = inverse_cdf(p[gamma : gamma + 1], np.array([emit_u]))
    return RoundResult(accepted=gamma, token=int(bonus[0]))


def accepted_counts(
    p: NDArray[np.float32], own_counts: NDArray[np.integer], u: F64, slots_per_item: NDArray[np.integer]
) -> Ints:
    """How many leading slots of each item the standard rule accepts, for all streams of a message at once.

    The comparison is strict, so a token with p = 0 is rejected even at u = 0, and a NaN rejects.

    Args:
        p: [slots] p_i(x_i), flat over items.
        own_counts: [slots] q_i(x_i) in counts of 2^-16, from 1 to 65,536 (65,536 for a one-hot q).
        u: [slots] accept uniforms on [0, 1).
        slots_per_item: [n] slots of each item, summing to the number of slots.

    Returns:
        int64[n].
    """
    q = np.asarray(own_counts, np.float64) / TOTAL
    return _leading(u * q < p, slots_per_item)


def matched_counts(
    draft_ids: NDArray[np.integer], emit_ids: NDArray[np.integer], slots_per_item: NDArray[np.integer]
) -> Ints:
    """How many leading slots of each item equal the target's own token: the coupled rule, or temperature 0.

    Args:
        draft_ids: [slots] x_i, flat over items.
        emit_ids: [slots] y_i, the token that plain decoding emits at that slot.
        slots_per_item: [n] slots of each item.

    Returns:
        int64[n].
    """
    return _leading(draft_ids == emit_ids, slots_per_item)


def inverse_cdf(weights: NDArray[np.floating], u: F64) -> Ints:
    """One token per row by inversion, in id order.

    The running sum is sequential in float64 and u is scaled by its last value, so rounding can neither run past the end
    nor stop at a token of weight 0.

    Args:
        weights: [n, vocab] not negative, not necessarily normalised.
        u: [n] uniforms on [0, 1).

    Returns:
        int64[n] ids of positive weight.

    Raises:
        ValueError: a row has no positive weight, or one that is not finite.
    """
    cumulative = np.cumsum(weights, axis=1, dtype=np.float64)
    total = cumulative[:, -1]
    if not np.all((total > 0) & (total < np.inf)):
        raise ValueError("every row needs finite weights with a positive sum")
    return np.count_nonzero(cumulative <= (u * total)[:, None], axis=1)


def residual(p: NDArray[np.floating], q: NDArray[np.floating]) -> F64:
    """The weights of the token emitted on rejection: (p - q)+, not normalised.

    A row where nothing is positive (p = q up to rounding) falls back to p: such a slot is rejected with probability 0
    up to rounding, and whatever is emitted still has p > 0. There is no threshold.

    Args:
        p, q: [n, vocab].
    """
    positive = np.maximum(np.asarray(p, np.float64) - q, 0)
    return np.where(np.any(positive > 0, axis=1, keepdims=True), positive, p)


def _leading(accepted: NDArray[np.bool_], slots_per_item: NDArray[np.integer]) -> Ints:
    """Length of the leading run of True within each item's share of a flat column."""
    ends = np.cumsum(slots_per_item, dtype=np.int64)
    starts = ends - slots_per_item
    rejections = np.append(np.flatnonzero(~accepted), len(accepted))
    first_rejection = rejections[np.searchsorted(rejections, starts)]
    return np.minimum(first_rejection, ends) - starts
