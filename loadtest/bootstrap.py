"""Intervals by resampling: first the visits, then the streams of each.

Streams of one visit share its moment on the machine, so resampling streams alone would promise too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
DRAWS = 2000
Rates = Sequence[Sequence[float]]
"""[visits][streams] tokens per second."""


class Interval(NamedTuple):
    """The middle 95 % of the draws."""

    low: float
    high: float


def mean(rates: Rates) -> float:
    """Tokens per second and stream: the mean over visits of the mean over streams."""
    return float(np.mean([np.mean(visit) for visit in rates]))


def ratio_draws(arm: Rates, plain: Rates, rng: np.random.Generator, draws: int = DRAWS) -> F64:
    """[draws] ratio of the arm's rate to plain decoding's.

    Visits are paired: the i-th of both belongs to one pass over the cells, close together in time, and a draw takes
    both or neither.
    """
    visits = min(len(arm), len(plain))
    chosen = rng.integers(visits, size=(draws, visits))
    return _means(arm[:visits], chosen, rng) / _means(plain[:visits], chosen, rng)


def _means(rates: Rates, chosen: NDArray[np.int64], rng: np.random.Generator) -> F64:
    draws = len(chosen)
    by_visit = np.stack(
        [rng.choice(np.asarray(visit), size=(draws, len(visit))).mean(axis=1) for visit in rates], axis=1
    )
    return np.take_along_axis(by_visit, chosen, axis=1).mean(axis=1)


def interval(draws: F64) -> Interval:
    """95 %, by percentiles. Infinite draws are allowed: an end of the interval may be infinite."""
    low, high = np.quantile(draws, [0.025, 0.975], method="nearest")
    return Interval(float(low), float(high))
