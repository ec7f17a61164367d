"""Costs: what target steps, proposals and the way to the target take, as the coordinator knows them now."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coordinator.config import MAX_GAMMA
from coordinator.cost_table import CostTable
from outrider.costs import CostProfile, Curve

F64 = NDArray[np.float64]

_NEWEST = 0.1


class Costs:
    """Times in seconds: what the services measured at their start, corrected by what every message says since.

    Attributes:
        target: of target steps, by token rows.
        draft: of proposals, by slots, the way to the draft included.
        link_s: the way to the target and back.
        draft_link_s: the way to the draft and back, as measured when it was reached; contained in `draft`.
        replicas: targets that share the streams.
        other_rows: rows of a step beside those that are answered here: of prompts, and of other coordinators.
        target_profile, draft_profile: what the services measured, None where they have not.
    """

    def __init__(self) -> None:
        self.target = CostTable()
        self.draft = CostTable()
        self.link_s = 0.0
        self.draft_link_s = 0.0
        self.replicas = 1
        self.other_rows = 0.0
        self.target_profile: CostProfile | None = None
        self.draft_profile: CostProfile | None = None

    def __bool__(self) -> bool:
        """Whether both sides' costs are known, so that gammas can be compared."""
        return self.target.is_known and self.draft.is_known

    def observe_link(self, seconds: float) -> None:
        """Adds one round trip to the target without the target's own time."""
        self.link_s += _NEWEST * (max(0.0, seconds) - self.link_s)

    def observe_rows(self, step: int, answered: int) -> None:
        """Adds a step: all its rows, and those that this coordinator was answered."""
        self.other_rows += _NEWEST * (max(0, step - answered) - self.other_rows)

    def expect(self, streams: int, context: float) -> None:
        """What the profiles say for `streams` streams with `context` tokens each on average."""
        streams = max(1, -(-streams // self.replicas))
        if self.target_profile is not None:
            self.target.expect(self.target_profile.curve(streams, context))
        if self.draft_profile is not None:
            slots = np.arange(1.0, MAX_GAMMA + 1)
            slot_s = float(self.draft_profile.curve(streams, context)(streams))
            self.draft.expect(Curve(slots, self.draft_link_s + slot_s * slots))

    def step_s(self, rows: ArrayLike) -> F64:
        """Seconds of a target step, where `rows` token rows are spread over all targets."""
        return self.target.predict(np.ceil(np.asarray(rows) / self.replicas + self.other_rows))

    def round_s(self, depth: int) -> F64:
        """[depth + 1] seconds that a round of 0 .. depth slots takes beside the target's step; rises with depth.

        0 for gamma = 0: plain streams run free of the draft and of the way to and fro.
        """
        seconds: F64 = np.maximum.accumulate(self.draft.predict(np.arange(depth + 1)) + self.link_s)
        seconds[0] = 0.0
        return seconds
