"""The batch size at which speculation stops paying, from measured ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from loadtest.bootstrap import F64, Interval, interval


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where a curve of ratios crosses 1.

    Attributes:
        batch: where it does; 0 if it lies below 1 from the smallest batch on, infinity if it never comes down to it.
        interval: 95 %, in the same terms.
        smallest, largest: batches that were measured.
    """

    batch: float
    interval: Interval
    smallest: int
    largest: int

    @property
    def verdict(self) -> str:
        """In words."""
        if math.isinf(self.batch):
            return f"none up to {self.largest}"
        if self.batch == 0:
            return f"does not pay at {self.smallest} or more"
        return f"{self.batch:.1f}"

    def as_json(self) -> dict[str, Any]:
        """Ends beyond what was measured are null."""
        low, high = (None if end == 0 or math.isinf(end) else round(end, 2) for end in self.interval)
        batch = None if self.batch == 0 or math.isinf(self.batch) else round(self.batch, 2)
        return {"batch": batch, "interval": [low, high], "verdict": self.verdict}


def falling(ratios: ArrayLike) -> F64:
    """The closest curve that never rises, in least squares (pool adjacent violators).

    A single noisy cell would otherwise give a curve several crossings.
    """
    blocks: list[tuple[float, int]] = []
    for value in np.asarray(ratios, np.float64):
        mean, count = float(value), 1
        while blocks and blocks[-1][0] < mean:
            other, others = blocks.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def crossing(batches: Sequence[int], ratios: ArrayLike) -> float:
    """The batch at which the falling curve through the ratios crosses 1, linear between neighbours.

    Args:
        batches: ascending.
        ratios: [batches] throughput over that of plain decoding.

    Returns:
        0 where it starts below 1, infinity where it ends at 1 or above.
    """
    curve = falling(ratios)
    below = np.flatnonzero(curve < 1)
    if not len(below):
        return math.inf
    right = int(below[0])
    if right == 0:
        return 0.0
    left = right - 1
    share = (curve[left] - 1) / (curve[left] - curve[right])
    return float(batches[left] + share * (batches[right] - batches[left]))


def crossover(batches: Sequence[int], ratios: Sequence[float], draws: Sequence[F64]) -> Crossover:
    """The crossover and its interval.

    Args:
        draws: [batches][draws] bootstrap draws of each ratio.
    """
    drawn = np.array([crossing(batches, column) for column in np.stack(draws).T])
    return Crossover(crossing(batches, ratios), interval(drawn), min(batches), max(batches))
