"""What a step of a model costs: measured samples, the plane fitted through them, and the curve that plans use.

    T = max(floor, a + b x rows + c x context)

with `rows` the tokens fed in a step over all streams and `context` the cached tokens that they attend to, summed over
the streams. The floor is the memory-bound regime, where the weights are read once whatever the step holds. Times are in
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]

_BEYOND = 8
"""The curve goes on with the fitted slope up to so many times the largest step that was measured."""


class StepCost(NamedTuple):
    """A step of `streams` streams that feed `tokens` tokens each behind `context` cached ones each.

    Attributes:
        forward_s: in the model.
        sample_s: in processing the logits of all rows and drawing from them at temperature 1.
    """

    streams: int
    tokens: int
    context: int
    forward_s: float
    sample_s: float

    @property
    def rows(self) -> int:
        return self.streams * self.tokens

    @property
    def total_s(self) -> float:
        return self.forward_s + self.sample_s


class Fit(NamedTuple):
    """The plane and its floor; none of its numbers is negative."""

    fixed_s: float
    row_s: float
    context_s: float
    floor_s: float

    def __call__(self, rows: ArrayLike, context: ArrayLike) -> F64:
        plane = self.fixed_s + self.row_s * np.asarray(rows, np.float64) + self.context_s * np.asarray(context)
        return np.maximum(self.floor_s, plane)


class Curve(NamedTuple):
    """Seconds at rising numbers of rows; seconds never fall."""

    rows: F64
    seconds: F64

    def __call__(self, rows: ArrayLike) -> F64:
        """Linear in between; flat below and beyond."""
        return np.interp(np.asarray(rows, np.float64), self.rows, self.seconds)


@dataclass(frozen=True, slots=True)
class CostProfile:
    """T(B, n, L) as measured on one device.

    Attributes:
        steps: the samples, at least one.
        source: "measured" in this process, or "cache".
        seconds: what measuring took.
        fit: through the samples.
    """

    steps: tuple[StepCost, ...]
    source: str = "measured"
    seconds: float = 0.0
    fit: Fit = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fit", fit_steps(self.steps))

    def curve(self, streams: int, context: float) -> Curve:
        """T by rows for a load.

        What was measured counts where it was measured, brought to the wanted context by the fit and made monotone; the
        fit's slope goes on beyond it.

        Args:
            streams: streams in the step.
            context: cached tokens of each.
        """
        c, total = self.fit.context_s, streams * context
        by_rows: dict[int, list[float]] = {}
        for step in self.steps:
            by_rows.setdefault(step.rows, []).append(step.total_s - c * step.streams * step.context)
        rows = np.array(sorted(by_rows), np.float64)
        seconds = isotonic([float(np.mean(by_rows[int(count)])) for count in rows]) + c * total
        seconds = np.maximum(seconds, min(step.total_s for step in self.steps))
        slope = max(self.fit.row_s, _last_slope(rows, seconds))
        end = _BEYOND * rows[-1]
        return Curve(np.append(rows, end), np.append(seconds, seconds[-1] + slope * (end - rows[-1])))

    def to_json(self) -> dict[str, Any]:
        """For the cache on disk and for people's programs."""
        return {
            "steps": [step._asdict() for step in self.steps],
            "fit": self.fit._asdict(),
            "source": self.source,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], source: str) -> CostProfile:
        """
        Raises:
            KeyError, TypeError, ValueError: it is no profile.
        """
        steps = tuple(
            StepCost(
                int(step["streams"]),
                int(step["tokens"]),
                int(step["context"]),
                float(step["forward_s"]),
                float(step["sample_s"]),
            )
            for step in content["steps"]
        )
        return cls(steps, source, float(content["seconds"]))


def fit_steps(steps: Sequence[StepCost]) -> Fit:
    """The plane of least squares with no negative coefficient, and the cheapest step as its floor.

    Three coefficients are few enough to try every set of those that are not 0.

    Raises:
        ValueError: there are no steps.
    """
    if not steps:
        raise ValueError("nothing was measured")
    columns = np.array([[1.0, step.rows, step.streams * step.context] for step in steps])
    seconds = np.array([step.total_s for step in steps])
    best, least = np.zeros(3), np.inf
    for size in (1, 2, 3):
        for chosen in map(list, combinations(range(3), size)):
            part, *_ = np.linalg.lstsq(columns[:, chosen], seconds, rcond=None)
            if np.any(part < 0):
                continue
            coefficients = np.zeros(3)
            coefficients[chosen] = part
            error = float(np.square(columns @ coefficients - seconds).sum())
            if error < least * (1 - 1e-9):
                best, least = coefficients, error
    return Fit(float(best[0]), float(best[1]), float(best[2]), float(seconds.min()))


def isotonic(values: Sequence[float]) -> F64:
    """The rising sequence nearest to the values (pool adjacent violators): neighbours out of order share their mean."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, members = blocks.pop()
            mean, count = (before * members + mean * count) / (members + count), members + count
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def _last_slope(rows: F64, seconds: F64) -> float:
    if len(rows) < 2:
        return 0.0
    middle = len(rows) // 2
    return float((seconds[-1] - seconds[middle - 1]) / (rows[-1] - rows[middle - 1]))
