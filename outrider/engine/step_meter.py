"""StepMeter: what the engine thread counts of its steps, and whether the one in progress hangs."""

from __future__ import annotations

import time
from typing import NamedTuple

STUCK_AFTER_S = 60.0
STUCK_TOKEN_S = 0.1
"""A step hangs if it takes longer than this and this per token, which no machine worth serving from needs."""


class RunnerStats(NamedTuple):
    """Counters since the start, and ages in seconds now.

    Attributes:
        steps_total: steps whose forward pass is done, or queued on a device.
        steps_replayed_total: those of them that were replayed from CUDA graphs.
        step_failures_total: steps that failed.
        step_streams_total: spans over all these steps.
        step_tokens_total: tokens fed over all these steps.
        last_step_age_s: since the last step ended; None before the first.
        step_running_s: since the step in progress began; None between steps.
    """

    steps_total: int
    steps_replayed_total: int
    step_failures_total: int
    step_streams_total: int
    step_tokens_total: int
    last_step_age_s: float | None
    step_running_s: float | None


class StepMeter:
    """Written by the engine thread, read by any."""

    def __init__(self) -> None:
        self._steps = self._replayed = self._failures = self._streams = self._tokens = 0
        self._started: float | None = None
        self._tokens_now = 0
        self._ended: float | None = None

    def begin(self, tokens: int) -> float:
        """A step of so many token rows begins; the monotonic time now."""
        self._tokens_now = tokens
        self._started = time.monotonic()
        return self._started

    def count(self, streams: int, tokens: int, *, replayed: bool) -> None:
        """The forward pass of the step is done, or queued on a device; answers may follow."""
        self._steps += 1
        self._replayed += replayed
        self._streams += streams
        self._tokens += tokens

    def count_failure(self) -> None:
        """The step failed."""
        self._failures += 1

    def end(self) -> None:
        """The step is over, either way."""
        self._started = None
        self._ended = time.monotonic()

    def stats(self) -> RunnerStats:
        """All of it."""
        now = time.monotonic()
        started, ended = self._started, self._ended
        return RunnerStats(
            steps_total=self._steps,
            steps_replayed_total=self._replayed,
            step_failures_total=self._failures,
            step_streams_total=self._streams,
            step_tokens_total=self._tokens,
            last_step_age_s=None if ended is None else now - ended,
            step_running_s=None if started is None else now - started,
        )

    @property
    def is_stuck(self) -> bool:
        """Whether the step in progress hangs."""
        started = self._started
        return started is not None and time.monotonic() - started > STUCK_AFTER_S + STUCK_TOKEN_S * self._tokens_now
