"""Stops a run that has become meaningless: too many failures."""

from __future__ import annotations

import asyncio
from collections import Counter

from loadtest.outcome import Outcome

_FEWEST = 20
"""A share is not judged on fewer requests than this; a single failure among the first twenty may pass."""


class Guard:
    """Counts ends, and says when the share of failures is too large.

    Attributes:
        stopped: set when the run has to end.
        failures: by class.
    """

    def __init__(self, max_error_rate: float) -> None:
        self.max_error_rate = max_error_rate
        self.stopped = asyncio.Event()
        self.failures: Counter[str] = Counter()
        self.last_detail = ""
        self._done = 0

    def count(self, outcome: Outcome) -> None:
        self._done += 1
        if outcome.failure is None:
            return
        self.failures[outcome.failure] += 1
        self.last_detail = outcome.detail
        if self.failures.total() > self.max_error_rate * max(self._done, _FEWEST):
            self.stopped.set()

    @property
    def verdict(self) -> str | None:
        """Why the run was stopped, or None."""
        if not self.stopped.is_set():
            return None
        classes = ", ".join(f"{name} {count}" for name, count in self.failures.most_common())
        return (
            f"{self.failures.total()} of {self._done} requests failed ({classes}), more than "
            f"{self.max_error_rate:.0%}; the last one said: {self.last_detail or 'nothing'}"
        )
