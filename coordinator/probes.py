"""When a draft that no stream uses is tried: rarely, and the more rarely the more often that confirmed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

PROBE_SHARE = 0.005
"""Share of the time, and of the rounds, that probes may take."""
PROBE_PAUSE_S = (0.5, 60.0)
"""Seconds between probes, first and at most; doubled by every probe that confirms gamma = 0."""


@dataclass(slots=True)
class Pause:
    """Seconds until something is tried again; doubled by every failure."""

    seconds: float = PROBE_PAUSE_S[0]
    until_s: float = 0.0

    def failed(self, now_s: float) -> None:
        self.until_s = now_s + self.seconds
        self.seconds = min(2 * self.seconds, PROBE_PAUSE_S[1])

    def worked(self) -> None:
        self.seconds = PROBE_PAUSE_S[0]


@dataclass(slots=True)
class Probes:
    """The schedule of probes, for all streams together. One is under way at a time.

    A probe whose token was accepted, of a draft that would pay if it were always right, calls for the next one at once:
    one accepted token says little. Such a chain is paid for as a whole before the next one begins.

    Attributes:
        clock: monotonic, in seconds.
        candidate: the stream that was called in for the next probe, or None.
        probing: the stream whose probe is under way, or None.
    """

    clock: Callable[[], float]
    candidate: int | None = None
    probing: int | None = None
    _pause: Pause = field(default_factory=Pause)
    _paid_s: float = 0.0
    _owed_s: float = 0.0

    @property
    def due(self) -> bool:
        """Whether a probe may begin."""
        return self.probing is None and self.clock() >= max(self._pause.until_s, self._paid_s)

    def began(self, stream_id: int, cost_s: float, round_s: float) -> None:
        """A probe begins.

        Args:
            cost_s: seconds that it takes.
            round_s: seconds that the streams take for a round of one of them.
        """
        self.candidate, self.probing = None, stream_id
        self._owed_s += max(cost_s, round_s) / PROBE_SHARE

    def ended(self, *, again: bool, promising: bool) -> None:
        """The probe under way ended.

        Args:
            again: whether another one is to follow at once.
            promising: whether it leaves the draft a chance; if not, it confirms gamma = 0.
        """
        self.probing = None
        if again:
            return
        now_s = self._pay()
        if promising:
            self._pause.worked()
        else:
            self._pause.failed(now_s)

    def forget(self, stream_id: int) -> None:
        """The stream ended."""
        if self.candidate == stream_id:
            self.candidate = None
        if self.probing == stream_id:
            self.probing = None
            self._pay()

    def _pay(self) -> float:
        """No probe until the ones that were made are a small share of the time; returns the time now."""
        now_s = self.clock()
        self._paid_s, self._owed_s = now_s + self._owed_s, 0.0
        return now_s
