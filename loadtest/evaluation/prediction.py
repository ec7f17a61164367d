"""From acceptance and costs to the improvement that each gamma should bring, one stream at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.series import Snapshot
from outrider.costs import F64, Curve
from outrider.economics import tokens_per_s
from outrider.errors import Unavailable


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, as the coordinator came to know them.

    Attributes:
        step: of a target pass, by its rows.
        proposal: [gamma] of a proposal of 1 .. gamma tokens, the way to the draft and back included.
        link_s: the way to the target and back.
    """

    step: Curve
    proposal: tuple[float, ...]
    link_s: float

    @property
    def slot_s(self) -> float:
        """A further drafted token: from the shortest proposal to the longest, the two that were surely seen."""
        further = len(self.proposal) - 1
        return max(0.0, self.proposal[-1] - self.proposal[0]) / further if further else self.proposal[0]

    @property
    def c(self) -> float:
        """A drafted token over a target pass of one row."""
        return self.slot_s / float(self.step(1))

    @property
    def way_s(self) -> float:
        """What a round spends on the ways to the draft and the target: all that does not grow with gamma."""
        return self.link_s + max(0.0, self.proposal[0] - self.slot_s)


def costs_of(now: Snapshot) -> Costs:
    """Reads the coordinator's series.

    Raises:
        Unavailable: it knows no cost of one of the sides.
    """
    sides: dict[str, dict[int, float]] = {"target": {}, "draft": {}}
    for (name, labels), value in now.samples.items():
        if name == "cost_seconds" and value > 0:
            own = dict(labels)
            sides[own["side"]][int(own["size"])] = value
    for side, known in sides.items():
        if 1 not in known:
            raise Unavailable(f"the coordinator does not know what a {side} step costs; give it longer answers")
    rows = sorted(sides["target"])
    step = Curve(np.array(rows, np.float64), np.array([sides["target"][row] for row in rows]))
    return Costs(step, tuple(sides["draft"][size] for size in sorted(sides["draft"])), now.value("link_seconds"))


def predict(acceptance: Sequence[float], round_s: Mapping[int, float], depth: int) -> dict[int, float]:
    """Improvement over plain decoding by gamma from 1 to `depth`.

    Args:
        acceptance: [at least depth] s_i, given that all before was accepted.
        round_s: seconds of a whole round at some gammas, 0 (a plain token) among them; linear in between, because
            drafted tokens follow one another.
        depth: largest gamma.
    """
    plain_s = round_s[0]
    known = sorted(gamma for gamma in round_s if gamma)
    spent = [round_s[gamma] for gamma in known]

    def step(rows: NDArray[np.int64]) -> F64:
        return np.full(np.shape(rows), plain_s)

    plain = tokens_per_s(1, 0, acceptance, step)
    return {
        gamma: tokens_per_s(1, gamma, acceptance, step, float(np.interp(gamma, known, spent)) - plain_s) / plain
        for gamma in range(1, depth + 1)
    }


def best_gamma(predicted: dict[int, float]) -> int:
    """The gamma with the largest improvement, the smaller one when equal; 0 where none exceeds 1."""
    best = max(predicted, key=lambda gamma: (predicted[gamma], -gamma), default=0)
    return best if best and predicted[best] > 1 else 0
