"""How much of a prompt is read beside streams that are decoding: as much as keeps the step they share short enough."""

from __future__ import annotations

from outrider.engine.pace import StepTime

SLOWDOWN = 2.0
LEAST_LIMIT_S = 0.1
"""A step with prompt rows takes at most so many times what it takes without them, or this long if that is longer."""
LEAST_ROWS = 16
"""A prompt gets ahead by so many rows a step whatever they cost."""
FIRST_ROWS = 64
GROWTH = 2
"""Sizes are tried out step by step: first so many rows, then at most so many times the largest step seen."""


class ChunkSize:
    """Learns what steps with prompt rows take. A row of a prompt costs less than one that is verified: no logits.

    Args:
        plain: what steps without prompt rows take.
    """

    def __init__(self, plain: StepTime) -> None:
        self._plain = plain
        self._mixed = StepTime()

    def observe(self, rows: int, seconds: float) -> None:
        """Notes a step that had prompt rows among its `rows`."""
        self._mixed.observe(rows, seconds)

    def rows(self, decoding: int, waiting: int, budget: int) -> int:
        """Prompt rows for the next step.

        Args:
            decoding: rows in it that are verified.
            waiting: rows that are on their way and will have to wait for it to end.
            budget: rows of a step at most.
        """
        plain_s = self._plain.predict(decoding + waiting)
        if not plain_s:
            return FIRST_ROWS
        limit_s = max(SLOWDOWN * plain_s, LEAST_LIMIT_S)
        most = min(budget, max(GROWTH * self._mixed.largest, decoding + FIRST_ROWS))
        return max(self._mixed.within(limit_s, most) - decoding, LEAST_ROWS)
