"""What the step former knows about time: how long a step takes, and how soon an answered stream is back.

Both are learnt on line from what is seen in service, because both change with the load, the draft and the link.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

_STEP_WEIGHT = 0.2
"""Weight of a new observation of a step's time; an old one is forgotten after some twenty steps of that size."""

_EXACT_ROWS = 16
"""Step sizes up to this one are told apart; larger ones fall into buckets an eighth wide."""

_RETURN_WEIGHT = 0.125
_DEVIATION_WEIGHT = 0.25
_DEVIATIONS = 4.0
"""The estimator of TCP's retransmission timer (RFC 6298): mean, mean deviation, and a limit four deviations out."""

_SPOILT = 0.25
"""A return sooner than this share of the mean starts afresh: the mean came from a stream that had been idle."""

_LEAST_DEVIATION = 0.02
"""Of the mean; keeps the limit off the mean where every return takes the same time."""


class StepTime:
    """T(rows): seconds of a step by its token rows.

    A running mean per step size, made monotone and linear between the sizes seen. Below the smallest and with a single
    size known it is constant (a memory-bound step); beyond the largest it goes on with the last slope, at most in
    proportion to the rows.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        """Notes a step without prompt tokens."""
        size = _bucket(rows)
        known = self._means.get(size)
        self._means[size] = seconds if known is None else known + _STEP_WEIGHT * (seconds - known)

    def predict(self, rows: int) -> float:
        """Seconds of a step of `rows` token rows; 0 for no rows, and before anything was seen."""
        if rows == 0 or not self._means:
            return 0.0
        below_rows = below = 0.0
        slope = 0.0
        for size, mean in sorted(self._means.items()):
            time = max(mean, below)
            if below_rows:
                slope = (time - below) / (size - below_rows)
            if rows <= size:
                return time - slope * (size - rows)
            below_rows, below = size, time
        return min(below + slope * (rows - below_rows), below * rows / below_rows)

    @property
    def largest(self) -> int:
        """The largest step seen, in rows; 0 before the first."""
        return max(self._means, default=0)

    def within(self, limit_s: float, most: int) -> int:
        """The largest number of rows up to `most` whose step is not expected to take longer than `limit_s`."""
        return bisect_right(range(1, most + 1), limit_s, key=self.predict)


class Return(NamedTuple):
    """When an answered stream comes back, in seconds after its answer: on average, and at the latest while not late."""

    mean_s: float
    latest_s: float


class ReturnTime:
    """How long a stream takes from its answer to its next item, by the slots of its last item.

    The next item's slots are not known beforehand; a stream's last gamma foretells them best.
    """

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}
        self._deviation: dict[int, float] = {}
        self._last_gamma = 0

    def observe(self, gamma: int, seconds: float) -> None:
        """Notes a return; a very late one counts as a moderately late one, so that one idle stream teaches little."""
        self._last_gamma = gamma
        if gamma not in self._mean or seconds < _SPOILT * self._mean[gamma]:
            self._mean[gamma], self._deviation[gamma] = seconds, seconds / 2
            return
        mean, deviation = self._mean[gamma], self._deviation[gamma]
        limit = mean + 2 * _DEVIATIONS * max(deviation, _LEAST_DEVIATION * mean)
        error = min(seconds, limit) - mean
        self._deviation[gamma] = deviation + _DEVIATION_WEIGHT * (abs(error) - deviation)
        self._mean[gamma] = mean + _RETURN_WEIGHT * error

    def expect(self, gamma: int) -> Return | None:
        """The return after an item of `gamma` slots (of another gamma, where this one was never seen), or None."""
        if not self._mean:
            return None
        known = gamma if gamma in self._mean else self._last_gamma
        mean = self._mean[known]
        return Return(mean, mean + _DEVIATIONS * max(self._deviation[known], _LEAST_DEVIATION * mean))


def _bucket(rows: int) -> int:
    if rows <= _EXACT_ROWS:
        return rows
    width = 1 << max(rows.bit_length() - 4, 0)
    return rows // width * width
