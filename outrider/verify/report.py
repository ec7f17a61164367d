"""What `outrider verify` found, and the exit code that says so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum

from outrider.verify.law import LEVEL, Law
from outrider.verify.texts import Equality


class Outcome(IntEnum):
    """The exit code."""

    PASSED = 0
    FAILED = 1
    COULD_NOT_JUDGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of it.

    Attributes:
        greedy, coupled: texts with and without speculation.
        near_ties: differing texts that a device's rounding explains.
        drafted: drafted tokens sent to the target while speculation was on.
        law: of tokens 2 and 3.
        law_drafted: drafted tokens among the samples of the law.
        dtype: of the target.
    """

    greedy: Equality
    coupled: Equality
    near_ties: int
    law: Law
    law_drafted: int
    dtype: str

    @property
    def unexplained(self) -> int:
        """Differing texts that nothing explains."""
        return len(self.greedy.differences) + len(self.coupled.differences) - self.near_ties

    @property
    def drafted(self) -> int:
        return self.greedy.drafted + self.coupled.drafted + self.law_drafted

    @property
    def outcome(self) -> Outcome:
        """A difference fails whatever was drafted; without one, each part must have drafted something."""
        if self.unexplained or not self.law.equal:
            return Outcome.FAILED
        if not (self.greedy.drafted and self.coupled.drafted and self.law_drafted):
            return Outcome.COULD_NOT_JUDGE
        return Outcome.PASSED

    @property
    def why_not_judged(self) -> str:
        """Which part drafted nothing."""
        parts = {"greedy texts": self.greedy.drafted, "coupled texts": self.coupled.drafted, "law": self.law_drafted}
        return f"nothing was drafted: {', '.join(part for part, drafted in parts.items() if not drafted)}"

    def to_json(self) -> str:
        """One line; `passed` is null where nothing can be said."""
        outcome = self.outcome
        return json.dumps(
            {
                "passed": None if outcome is Outcome.COULD_NOT_JUDGE else outcome is Outcome.PASSED,
                "greedy_equal": [self.greedy.equal, self.greedy.compared],
                "coupled_equal": [self.coupled.equal, self.coupled.compared],
                "near_ties": self.near_ties,
                "unexplained": self.unexplained,
                "drafted": self.drafted,
                "dtype": self.dtype,
                "law": {
                    "p_value": float(f"{self.law.p_value:.3g}"),
                    "tv": round(self.law.tv, 4),
                    "detectable_tv": round(self.law.detectable_tv, 4),
                    "samples": self.law.samples,
                },
            }
        )

    def lines(self) -> list[str]:
        """For a person."""
        law = self.law
        return [
            f"greedy texts equal: {self.greedy.equal} of {self.greedy.compared}",
            f"coupled texts at temperature 1 equal: {self.coupled.equal} of {self.coupled.compared}",
            f"differences: {self.near_ties} near ties, {self.unexplained} unexplained",
            f"law of tokens 2 and 3 at temperature 1: p = {law.p_value:.3g} (fails below {LEVEL:g}), total variation "
            f"{law.tv:.4f}; from {law.detectable_tv:.4f} on 95 runs in 100 find it ({law.samples:,} samples each)",
            f"drafted tokens verified: {self.drafted:,}; number format {self.dtype}",
        ]
