"""How long a target may owe an answer before it is taken for dead."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.cost_table import CostTable
from coordinator.state import StreamState

FACTOR = 3.0
ALLOWANCE_S = 1.0
"""A target is taken for dead after this many usual steps and this time without an answer."""
READING_TOKENS = 64
"""A target that lacks more than this of all texts together reads prompts, and a step with a prompt in it takes as long
as it takes. That its process lives, the link's own messages say; that a step hangs, the service itself."""


class Silence:
    """Of one target.

    Args:
        costs: of target steps, by token rows.
    """

    def __init__(self, costs: CostTable) -> None:
        self.heard_s = 0.0
        self._costs = costs
        self._patience = 1.0

    def heard(self, now_s: float) -> None:
        """It answered."""
        self.heard_s, self._patience = now_s, 1.0

    def broken(self) -> None:
        """The limit was reached. Should the target merely have become slow, it gets more time from now on."""
        self._patience *= 2

    def limit_s(self, owed: Collection[StreamState]) -> float | None:
        """Seconds within which an answer to any of these streams is due; None while nobody can tell."""
        unread = sum(state.committed - state.target.held - 1 for state in owed)
        if not owed or not self._costs or unread > READING_TOKENS:
            return None
        rows = sum(1 + (state.proposal.slots if state.proposal else 0) for state in owed)
        return self._patience * (FACTOR * self._costs.bound(rows) + ALLOWANCE_S)
