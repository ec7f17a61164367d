"""A plan: the gammas of all streams for the rounds to come, chosen together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.costs import Costs
from outrider.economics import choose_gammas

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


class Plan(NamedTuple):
    """Gammas by stream, and whether one of them goes to 0 or leaves it."""

    gammas: I64
    switched: bool


def make_plan(costs: Costs, survivals: F64, present: Sequence[int | None], margin: float) -> Plan:
    """The best plan; or the one beside it that changes no mode, where that would gain too little.

    Between two gammas above 0 a change costs nothing; to and from 0 it costs a drained run or a catch-up.

    Args:
        costs: at the present load.
        survivals: [streams, depth] chance that a slot and all before it are accepted.
        present: each stream's gamma now, None for a new one.
        margin: relative gain that a change of all streams must promise; of some, their share of it.
    """
    best = choose_gammas(survivals, costs.step_s, costs.round_s(survivals.shape[1]))
    before = np.array([b if gamma is None else gamma for gamma, b in zip(present, best.tolist(), strict=True)])
    switched = (best == 0) != (before == 0)
    if not switched.any():
        return Plan(best, switched=False)
    stay = np.where(switched, before, best)
    needed = 1 + margin * float(switched.mean())
    if rate(costs, survivals, best) < needed * rate(costs, survivals, stay):
        return Plan(stay, switched=False)
    return Plan(best, switched=True)


def rate(costs: Costs, survivals: F64, gammas: I64) -> float:
    """Expected tokens per second of a plan."""
    streams, depth = survivals.shape
    gained = survivals[np.arange(depth) < gammas[:, None]].sum()
    step_s = float(costs.step_s(streams + gammas.sum()))
    return float(streams + gained) / (step_s + float(costs.round_s(depth)[gammas.max(initial=0)]))


def worth_of_a_slot(costs: Costs, survivals: F64, gammas: I64) -> float:
    """Tokens that one more slot's time is worth at the plan's rate: with less chance of surviving it is a loss.

    The slot costs its row, and its share of a step of the draft with all streams that draft.
    """
    drafting = int((gammas > 0).sum())
    if not drafting:
        return 0.0
    deepest, rows = int(gammas.max()), len(gammas) + int(gammas.sum())
    round_s, steps = costs.round_s(survivals.shape[1]), costs.step_s(np.array([rows - 1, rows]))
    slot_s = (round_s[deepest] - round_s[1]) / (deepest - 1) if deepest > 1 else 0.0
    worth = rate(costs, survivals, gammas) * (float(steps[1] - steps[0]) + float(slot_s) / drafting)
    return min(max(worth, 0.0), 1.0)
