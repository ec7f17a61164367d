"""What speculation is worth: pure functions of measured acceptance and measured costs.

Source: Leviathan et al., arXiv 2211.17192, section 3. With s_i the chance that slot i is accepted given that it is
tested (s_i = alpha when independent), a round of gamma drafted tokens gives

    E(gamma) = 1 + s_1 + s_1 s_2 + ... + s_1 .. s_gamma

tokens, and costs gamma c + 1 target passes, c being the cost of a drafted token over that of a target pass.
Times are in seconds throughout.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]
StepCost = Callable[[NDArray[np.int64]], F64]
"""Seconds of a target step as a function of the tokens in it, vectorised."""


def survival(acceptance: ArrayLike, gamma: int | None = None) -> F64:
    """[..., gamma] chance that a slot and all before it are accepted: s_1, s_1 s_2, ...

    Args:
        acceptance: [..., depth] s_i, acceptance given that the slot is tested; or one alpha for all slots.
        gamma: slots to look at; all of them by default.

    Raises:
        ValueError: fewer than ``gamma`` positions are known.
    """
    s = np.asarray(acceptance, np.float64)
    if s.ndim == 0:
        if gamma is None:
            raise ValueError("one alpha for all slots needs gamma")
        s = np.full(gamma, s, np.float64)
    elif gamma is not None and gamma > s.shape[-1]:
        raise ValueError(f"acceptance is known for {s.shape[-1]} slots, not for {gamma}")
    return np.cumprod(s[..., :gamma], axis=-1, dtype=np.float64)


def expected_tokens(acceptance: ArrayLike, gamma: int | None = None) -> float:
    """E(gamma), tokens per round; for one alpha (1 - alpha^(gamma+1)) / (1 - alpha).

    Args:
        acceptance: [depth] s_i, or one alpha for all slots.
        gamma: as in ``survival``.
    """
    return 1.0 + float(survival(acceptance, gamma).sum())


def improvement(acceptance: ArrayLike, gamma: int, c: float) -> float:
    """Expected speed-up over plain decoding where a pass costs the same for any few tokens (theorem 3.8)."""
    return expected_tokens(acceptance, gamma) / (gamma * c + 1)


def best_gamma(acceptance: ArrayLike, c: float, gamma_max: int) -> int:
    """The gamma from 0 to ``gamma_max`` with the largest improvement; the smaller one when equal."""
    return int(np.argmax([improvement(acceptance, gamma, c) for gamma in range(gamma_max + 1)]))


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of a target step over n tokens: ``fixed_s + token_s max(0, n - free_tokens)``.

    The flat part is the memory-bound regime, where the weights are read once whatever n is; the slope is the
    compute-bound one.
    """

    fixed_s: float
    token_s: float
    free_tokens: float = 0

    def __call__(self, tokens: ArrayLike) -> F64:
        return self.fixed_s + self.token_s * np.maximum(0, np.asarray(tokens, np.float64) - self.free_tokens)


def tokens_per_s(
    streams: int, gamma: int, acceptance: ArrayLike, step_cost: StepCost, overhead_s: float = 0.0
) -> float:
    """Throughput of ``streams`` streams that all draft gamma tokens and step together.

    Args:
        streams: decoding streams B.
        gamma: drafted tokens per stream and round; 0 is plain decoding.
        acceptance: as in ``survival``.
        step_cost: seconds of a target step over B (gamma + 1) tokens.
        overhead_s: seconds of a round outside the target step: drafting and the round trip.
    """
    step_s = float(step_cost(np.array(streams * (gamma + 1))))
    return streams * expected_tokens(acceptance, gamma) / (step_s + overhead_s)


def crossover_batch(acceptance: ArrayLike, gamma: int, cost: LinearCost, overhead_s: float = 0.0) -> float:
    """The batch at which drafting gamma tokens stops paying: the B where both throughputs are equal.

    ``E T(B) - T(B (gamma + 1)) - overhead`` has three straight pieces (both steps within the free tokens, one, none)
    and never rises with B, since E <= gamma + 1; so its first zero is the crossover.

    Returns:
        B as a real number; 0 where it never pays, infinity where it always does.
    """
    tokens = expected_tokens(acceptance, gamma)
    gain_s = tokens * cost.fixed_s - cost.fixed_s - overhead_s
    if gain_s <= 0:
        return 0.0
    bend, plain_bend = cost.free_tokens / (gamma + 1), cost.free_tokens
    slope = cost.token_s * (gamma + 1)
    if gain_s <= slope * (plain_bend - bend):
        return bend + gain_s / slope
    gain_s -= slope * (plain_bend - bend)
    slope -= cost.token_s * tokens
    return plain_bend + gain_s / slope if slope > 0 else math.inf


def choose_gammas(
    survivals: F64, step_cost: StepCost | ArrayLike, draft_cost_s: ArrayLike, round_trip_s: float = 0.0
) -> NDArray[np.int64]:
    """The gammas of one step, chosen together: argmax of tokens per second over all allocations, 0 included.

        G = sum_j E_j(gamma_j) / (T(sum_j (gamma_j + 1)) + T_draft(max_j gamma_j) + RTT)

    Each further slot of a stream adds its survival to the tokens, and survivals fall with depth; so for a given deepest
    slot D and a given number of slots the best choice is the slots of highest survival among depths 1..D. All prefixes
    of that order for all D are scored at once. (A stream's own best gamma is not the optimum: it ignores what its
    tokens cost the others.)

    Args:
        survivals: [streams, depth] s_1 .. s_i, not rising with depth. A slot of survival 0 is never chosen, which is
            how a caller caps a stream.
        step_cost: seconds of a target step, as a function or a table over the number of tokens 0..streams (depth + 1).
        draft_cost_s: [depth + 1] seconds to draft that deep, not falling with depth.
        round_trip_s: seconds charged to every step. Where plain streams run free of the round trip, leave it 0 and put
            the round trip into ``draft_cost_s[1:]``.

    Returns:
        int64[streams]; of equally good allocations the shallowest, and then the one with the fewest slots.

    Raises:
        ValueError: survivals rise or draft costs fall with depth; either would make the greedy order wrong.
    """
    survivals = np.asarray(survivals, np.float64)
    streams, depth = survivals.shape
    draft_s = np.asarray(draft_cost_s, np.float64)[: depth + 1]
    if np.any(np.diff(survivals, axis=1) > 0) or np.any(np.diff(draft_s) < 0):
        raise ValueError("survivals must not rise, nor draft costs fall, with depth")

    # Depth by depth, so that the stable sort never takes a slot before the shallower ones of its stream.
    flat = survivals.T.ravel()
    order = np.argsort(-flat, kind="stable")
    slot_depth, slot_stream = order // max(streams, 1) + 1, order % max(streams, 1)

    # Row D, column m: the first m slots of the order, of those at most D deep. Others repeat the column before them.
    allowed = slot_depth <= np.arange(depth + 1)[:, None]
    taken = np.pad(np.cumsum(allowed, axis=1), ((0, 0), (1, 0)))
    gained = np.pad(np.cumsum(np.where(allowed, flat[order], 0.0), axis=1), ((0, 0), (1, 0)))
    tokens = streams + taken
    step_s = step_cost(tokens) if callable(step_cost) else np.asarray(step_cost, np.float64)[tokens]
    rate = (streams + gained) / (step_s + draft_s[:, None] + round_trip_s)
    deepest, slots = divmod(int(np.argmax(rate)), len(order) + 1)
    chosen = slot_stream[:slots][allowed[deepest, :slots]]
    return np.bincount(chosen, minlength=streams)
