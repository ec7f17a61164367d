"""Seconds by size, learnt from what happens: a step by its token rows, a proposal by its slots."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import ArrayLike, NDArray

_NEWEST = 0.1
"""Weight of the newest observation."""
_SPREAD = 2.0
"""Mean absolute deviations by which an observation may exceed the average and still be expected."""


class CostTable:
    """An average per size bucket, never falling with size; between buckets linear, beyond the last its slope goes on.

    Sizes are kept apart up to 16 and in steps of about a fifth beyond, so that what small steps teach does not leak
    into large ones.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._mean: dict[int, float] = {}
        self._deviation: dict[int, float] = {}
        self._curve: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def observe(self, size: int, seconds: float) -> None:
        """Adds an observation."""
        bucket = _bucket(size)
        self._curve = None
        if bucket not in self._mean:
            insort(self._sizes, bucket)
            self._mean[bucket], self._deviation[bucket] = seconds, seconds / 2
            return
        off = seconds - self._mean[bucket]
        self._mean[bucket] += _NEWEST * off
        self._deviation[bucket] += _NEWEST * (abs(off) - self._deviation[bucket])

    def predict(self, sizes: ArrayLike) -> NDArray[np.float64]:
        """Expected seconds, same shape as `sizes`; 0 as long as nothing was observed."""
        wanted = np.asarray(sizes, np.float64)
        if not self._sizes:
            return np.zeros_like(wanted)
        if self._curve is None:
            means = np.array([self._mean[size] for size in self._sizes])
            self._curve = np.array(self._sizes, np.float64), np.maximum.accumulate(means)
        known, seconds = self._curve
        inside = np.interp(wanted, known, seconds)
        if len(known) < 2:
            return inside
        slope = (seconds[-1] - seconds[0]) / (known[-1] - known[0])
        return inside + slope * np.maximum(0.0, wanted - known[-1])

    def bound(self, size: int) -> float:
        """Seconds that an observation of this size rarely exceeds; 0 as long as nothing was observed."""
        if not self._sizes:
            return 0.0
        nearest = self._sizes[min(bisect_left(self._sizes, _bucket(size)), len(self._sizes) - 1)]
        return float(self.predict(size)) + _SPREAD * self._deviation[nearest]


def _bucket(size: int) -> int:
    if size <= 16:
        return size
    step = 1 << (size.bit_length() - 3)
    return size // step * step
