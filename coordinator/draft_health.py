"""Whether the draft is fit to be asked: two failures in a row take it out, one good answer takes it back."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

STRIKES = 2
RETRY_S = (0.5, 4.0)
"""Seconds until a draft that is out is tried again, first and at most: it is back within 5 s of being well."""
WELL_AFTER = 16
"""Good answers in a row after which earlier failures no longer lengthen the pause."""


@dataclass(slots=True)
class DraftHealth:
    """Times are those of one monotonic clock, in seconds.

    Attributes:
        out_reason: why the draft is not asked, None while it is in.
        since_s: when it went out.
        banned: whether only a new instance of the service is trusted again.
        probing: whether a trial item is unanswered.
    """

    out_reason: str | None = None
    since_s: float = 0.0
    banned: bool = False
    probing: bool = False
    _strikes: int = 0
    _good: int = 0
    _pause_s: float = RETRY_S[0]
    _retry_s: float = 0.0

    def reset(self) -> None:
        """Another instance is there: nothing is held against it."""
        self.out_reason, self.banned, self.probing = None, False, False
        self._strikes, self._good, self._pause_s = 0, 0, RETRY_S[0]

    def strike(self, reason: str, now_s: float) -> bool:
        """One failure; True if it takes the draft out."""
        self._strikes += 1
        self._good = 0
        if self._strikes < STRIKES or self.out_reason is not None:
            return False
        self.take_out(reason, now_s)
        return True

    def take_out(self, reason: str, now_s: float, *, banned: bool = False) -> None:
        """No more questions until a trial goes well, or for a banned instance never."""
        if self.out_reason is None:
            self.since_s = now_s
            logger.warning("decoding without the draft: %s", reason)
        self.out_reason, self.banned, self.probing = reason, self.banned or banned, False
        self._retry_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, RETRY_S[1])

    def may_probe(self, now_s: float) -> bool:
        """Whether it is time for a trial item."""
        return self.out_reason is not None and not self.banned and not self.probing and now_s >= self._retry_s

    def probe_failed(self, now_s: float) -> None:
        """The trial item was not answered."""
        self.probing = False
        self._retry_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, RETRY_S[1])

    def good(self) -> None:
        """An item was answered as it should be."""
        self._strikes, self.probing = 0, False
        self._good += 1
        if self._good >= WELL_AFTER:
            self._pause_s = RETRY_S[0]
        if self.out_reason is not None and not self.banned:
            logger.info("the draft answers again and is back")
            self.out_reason = None
