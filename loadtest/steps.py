"""Where the time of a round went, from what the server counted while a cell was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.cells import CellResult
from loadtest.crossover import falling
from loadtest.series import Snapshot

STAGES = ("draft queue", "draft pass", "draft sampling", "target queue", "target pass", "target sampling")
REST = "links, coordinator, HTTP"
_SERIES = {
    "draft queue": ("draft", "queue"),
    "draft pass": ("draft", "forward"),
    "draft sampling": ("draft", "sample"),
    "target queue": ("target", "queue"),
    "target pass": ("target", "forward"),
    "target sampling": ("target", "sample"),
}


@dataclass(frozen=True, slots=True)
class Steps:
    """Means over a cell's windows.

    Attributes:
        round_ms: from one piece of a stream to its next.
        parts_ms: what a round is made of, by stage; the draft's by the share of rounds that draft, and the rest is what
            no service accounts for.
        streams_per_step: streams in a target step; fewer than the batch means that it ran in cohorts.
        rows_per_step: tokens in a target step.
        step_ms: pass and sampling of a target step.
        draft_ms: pass and sampling of a proposal; 0 where there were none.
        steps_per_s: target steps.
        target_busy, draft_busy: share of the time in which the side computed.
    """

    round_ms: float
    parts_ms: dict[str, float]
    streams_per_step: float
    rows_per_step: float
    step_ms: float
    draft_ms: float
    steps_per_s: float
    target_busy: float
    draft_busy: float

    def as_json(self) -> dict[str, Any]:
        return {
            "round_ms": round(self.round_ms, 3),
            "parts_ms": {name: round(value, 3) for name, value in self.parts_ms.items()},
            "streams_per_step": round(self.streams_per_step, 3),
            "rows_per_step": round(self.rows_per_step, 3),
            "step_ms": round(self.step_ms, 3),
            "draft_ms": round(self.draft_ms, 3),
            "steps_per_s": round(self.steps_per_s, 3),
            "target_busy": round(self.target_busy, 4),
            "draft_busy": round(self.draft_busy, 4),
        }


def steps(result: CellResult) -> Steps | None:
    """Of all visits together; None where the server does not export Outrider's series, or nothing was counted."""
    series: Snapshot | None = None
    for visit in result.visits:
        if visit.series is None:
            return None
        series = visit.series if series is None else series.plus(visit.series)
    if series is None:
        return None
    count = {side: series.value("step_seconds_count", side=side, stage="total") for side in ("draft", "target")}
    rounds = series.value("gamma_count")
    seconds = sum(visit.seconds for visit in result.visits)
    if not count["target"] or not rounds or not seconds:
        return None

    def total(name: str) -> float:
        side, stage = _SERIES[name]
        return series.value("step_seconds_sum", side=side, stage=stage)

    def mean_ms(name: str) -> float:
        side, _ = _SERIES[name]
        return 1000 * total(name) / count[side] if count[side] else 0.0

    drafting = min(1.0, series.value("spec_decode_num_drafts_total") / rounds)
    parts = {name: mean_ms(name) * (drafting if name.startswith("draft") else 1.0) for name in STAGES}
    rounds_seen = sum(visit.rounds for visit in result.visits)
    round_ms = 1000 * seconds * result.cell.batch / rounds_seen
    drafted = series.value("spec_decode_num_draft_tokens_total")
    return Steps(
        round_ms=round_ms,
        parts_ms={**parts, REST: max(0.0, round_ms - sum(parts.values()))},
        streams_per_step=rounds / count["target"],
        rows_per_step=(rounds + drafted) / count["target"],
        step_ms=parts["target pass"] + parts["target sampling"],
        draft_ms=mean_ms("draft pass") + mean_ms("draft sampling"),
        steps_per_s=count["target"] / seconds,
        target_busy=min(1.0, (total("target pass") + total("target sampling")) / seconds),
        draft_busy=min(1.0, (total("draft pass") + total("draft sampling")) / seconds),
    )


class StepCost:
    """Seconds of a target step over its rows, from the steps that were measured: a line through their means.

    The points are made monotone (more rows never cost less) and joined by straight lines; beyond the last one the line
    goes on as steeply as it came there from half as many rows.
    """

    def __init__(self, measured: Sequence[Steps]) -> None:
        """
        Raises:
            ValueError: nothing was measured.
        """
        if not measured:
            raise ValueError("no step was measured")
        points = sorted((step.rows_per_step, step.step_ms / 1000) for step in measured)
        self._rows = np.array([rows for rows, _ in points])
        self._seconds = -falling([-seconds for _, seconds in points])

    def __call__(self, rows: float) -> float:
        if len(self._rows) > 1 and rows > self._rows[-1]:
            first = min(int(np.searchsorted(self._rows, self._rows[-1] / 2)), len(self._rows) - 2)
            span = self._rows[-1] - self._rows[first]
            slope = (self._seconds[-1] - self._seconds[first]) / span if span > 0 else 0.0
            return float(self._seconds[-1] + slope * (rows - self._rows[-1]))
        return float(np.interp(rows, self._rows, self._seconds))
