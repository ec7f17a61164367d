"""What the engine thread does while nobody asks anything of it."""

from __future__ import annotations

import logging
import time
from typing import Protocol

import torch

log = logging.getLogger(__name__)

IDLE_AFTER_S = 5.0
"""Idle work begins when there was nothing to do for so long, and so not while other parts are still being loaded."""


class IdleWork(Protocol):
    """What the engine thread does while the worker has nothing for it."""

    def step(self) -> float | None:
        """Does a little of it; returns seconds until it wants to be called again, or None when all is done."""

    def pause(self) -> None:
        """The worker has something to do."""


class Idler:
    """Gives idle work its turns. Used in the engine thread only.

    Attributes:
        work: what is to be done; None if there is nothing, or no more.
    """

    def __init__(self) -> None:
        self.work: IdleWork | None = None
        self._since = time.monotonic()

    def begin(self) -> None:
        """The thread begins to serve: it is idle from now on."""
        self._since = time.monotonic()

    def busy(self) -> None:
        """There is something to do."""
        if self.work is not None:
            self.work.pause()
            self._since = time.monotonic()

    def idle(self) -> float | None:
        """Some of the work, if there is any and it is time; returns seconds until the next."""
        if self.work is None:
            return None
        left_s = self._since + IDLE_AFTER_S - time.monotonic()
        if left_s > 0:
            return left_s
        try:
            wait_s = self.work.step()
        except torch.AcceleratorError:
            raise
        except Exception:
            log.exception("idle work failed and is given up")
            self.work.pause()
            wait_s = None
        if wait_s is None:
            self.work = None
        return wait_s
