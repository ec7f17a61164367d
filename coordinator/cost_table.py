"""Seconds by size, learnt from what happens: a step by its token rows, a proposal by its slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.costs import Curve

F64 = NDArray[np.float64]

_NEWEST = 0.1
"""Weight of the newest observation."""
_SPREAD = 2.0
"""Mean absolute deviations by which an observation may exceed the average and still be expected."""


@dataclass(slots=True)
class _Bucket:
    size: float
    seconds: float
    deviation: float
    expected: float
    """What the profile expected of the same observations; 0 where there was none."""


class CostTable:
    """An average per size bucket; never falls with size.

    What was not seen is taken to cost the least that a convex cost can (flat first, then rising, as a pass is): below
    the smallest size in proportion to size; in between no less than the smaller neighbour, and no less than the line
    through the next two larger ones. So whoever looks for the cheapest choice comes to try it, and then knows. Only
    beyond the largest size does the slope go on, lest a trial be very expensive.

    Where a profile says what to expect (`expect`), what was seen corrects it: by the ratio of both at the sizes seen,
    in between by a ratio in between. So a profile that is off because the machine is busy is put right by the first few
    steps, and sizes that were never seen are put right with it.

    Sizes are kept apart up to 16 and in steps of about a fifth beyond, so that what small steps teach does not leak
    into large ones.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._profile: Curve | None = None
        self._curve: tuple[F64, F64] | None = None

    def __bool__(self) -> bool:
        """Whether anything was observed."""
        return bool(self._buckets)

    @property
    def is_known(self) -> bool:
        """Whether there is anything to predict from."""
        return bool(self._buckets) or self._profile is not None

    def has_seen(self, size: int) -> bool:
        """Whether anything of about this size was observed."""
        return _bucket(size) in self._buckets

    def expect(self, profile: Curve | None) -> None:
        """What a profile says for the present load."""
        self._profile, self._curve = profile, None

    def observe(self, size: int, seconds: float) -> None:
        """Adds an observation."""
        self._curve = None
        expected = float(self._profile(size)) if self._profile is not None else 0.0
        bucket = self._buckets.get(_bucket(size))
        if bucket is None:
            self._buckets[_bucket(size)] = _Bucket(size, seconds, seconds / 2, expected)
            return
        off = seconds - bucket.seconds
        bucket.size += _NEWEST * (size - bucket.size)
        bucket.seconds += _NEWEST * off
        bucket.deviation += _NEWEST * (abs(off) - bucket.deviation)
        # Averaged alike, or else started with: an average that still holds a 0 would promise too much.
        bucket.expected = bucket.expected + _NEWEST * (expected - bucket.expected) if bucket.expected else expected

    def predict(self, sizes: ArrayLike) -> F64:
        """Expected seconds, same shape as `sizes`; 0 as long as nothing is known."""
        wanted = np.asarray(sizes, np.float64)
        if self._profile is not None:
            if self._curve is None:
                self._curve = self._corrected(self._profile)
            return np.interp(wanted, *self._curve)
        if not self._buckets:
            return np.zeros_like(wanted)
        if self._curve is None:
            buckets = [self._buckets[key] for key in sorted(self._buckets)]
            seconds = np.maximum.accumulate([bucket.seconds for bucket in buckets])
            self._curve = np.array([bucket.size for bucket in buckets]), seconds
        known, seconds = self._curve
        if len(known) == 1:
            return wanted * seconds[0] / known[0]
        slopes = np.diff(seconds) / np.diff(known)
        above = np.searchsorted(known, wanted, side="left").clip(1, len(known) - 1)
        next_slope = slopes[np.minimum(above, len(slopes) - 1)]
        least = np.maximum(seconds[above - 1], seconds[above] - next_slope * (known[above] - wanted))
        inside = np.minimum(least, np.interp(wanted, known, seconds)) * np.minimum(1.0, wanted / known[0])
        beyond = (seconds[-1] - seconds[0]) / (known[-1] - known[0]) * np.maximum(0.0, wanted - known[-1])
        return np.where(wanted >= known[-1], seconds[-1] + beyond, inside)

    def _corrected(self, profile: Curve) -> tuple[F64, F64]:
        """The profile times what was seen over what it expected."""
        seen = [self._buckets[key] for key in sorted(self._buckets) if self._buckets[key].expected > 0]
        if not seen:
            return profile.rows, profile.seconds
        sizes = np.array([bucket.size for bucket in seen])
        rows = np.union1d(profile.rows, sizes)
        ratios = np.interp(rows, sizes, [bucket.seconds / bucket.expected for bucket in seen])
        return rows, np.maximum.accumulate(profile(rows) * ratios)

    def bound(self, size: int) -> float:
        """Seconds that an observation of this size rarely exceeds; 0 as long as nothing was observed."""
        if not self._buckets:
            return 0.0
        nearest = min(self._buckets.values(), key=lambda bucket: abs(bucket.size - size))
        return max(float(self.predict(size)), nearest.seconds) + _SPREAD * nearest.deviation


def _bucket(size: int) -> int:
    if size <= 16:
        return size
    step = 1 << (size.bit_length() - 3)
    return size // step * step
