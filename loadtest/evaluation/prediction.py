"""From acceptance and costs to the improvement that each gamma should bring, one stream at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.evaluation.reading import Reading
from loadtest.series import Snapshot
from outrider.costs import Curve
from outrider.economics import expected_tokens
from outrider.errors import Unavailable

_FEWEST_ROUNDS = 8
"""With fewer the spread of a round's tokens is not known."""


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


def predict(acceptance: Sequence[float], learnt: Sequence[Reading], round_s: Mapping[int, float]) -> dict[int, float]:
    """Improvement over plain decoding by gamma from 1 on, to the depth of `acceptance`.

    Tokens of a round are E(gamma) by the acceptance by position, times how the learnt answers differ from that where
    they differ by more than chance. They do where acceptance comes in stretches, as that of a look-up in copied text
    does: a deep proposal crosses a stretch in few rounds, so that fewer of its rounds begin in one.

    Args:
        acceptance: s_i, given that all before was accepted.
        learnt: answers, at several gammas.
        round_s: seconds of a whole round at some gammas, 0 (a plain token) among them; linear in between, because
            drafted tokens follow one another.
    """
    known = sorted(gamma for gamma in round_s if gamma)
    spent = [round_s[gamma] for gamma in known]
    factors = stretches(acceptance, learnt)
    seen = sorted(factors)
    told = [factors[gamma] for gamma in seen]
    predicted = {}
    for gamma in range(1, len(acceptance) + 1):
        factor = float(np.interp(gamma, seen, told)) if seen else 1.0
        took_s = float(np.interp(gamma, known, spent))
        predicted[gamma] = factor * expected_tokens(acceptance, gamma) * round_s[0] / took_s
    return predicted


def stretches(acceptance: Sequence[float], learnt: Iterable[Reading]) -> dict[int, float]:
    """By gamma, tokens per round of the answers over those that the acceptance by position gives.

    A ratio is drawn towards 1 by as much of it as chance explains (the positive-part James-Stein estimate).
    """
    accepted: dict[int, list[int]] = {}
    for reading in learnt:
        if reading.gamma:
            accepted.setdefault(reading.gamma, []).extend(min(got, reading.gamma) for got in reading.accepted)
    ratios = {}
    for gamma, runs in accepted.items():
        if len(runs) < _FEWEST_ROUNDS:
            continue
        expected = expected_tokens(acceptance, gamma)
        apart = 1 + float(np.mean(runs)) - expected
        chance = float(np.var(runs, ddof=1)) / len(runs)
        kept = max(0.0, 1 - chance / apart**2) if apart else 0.0
        ratios[gamma] = 1 + kept * apart / expected
    return ratios


def best_gamma(predicted: dict[int, float]) -> int:
    """The gamma with the largest improvement, the smaller one when equal; 0 where none exceeds 1."""
    best = max(predicted, key=lambda gamma: (predicted[gamma], -gamma), default=0)
    return best if best and predicted[best] > 1 else 0
