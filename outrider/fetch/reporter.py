"""What a download tells whoever watches it. The command line renders it, a service logs it."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is about to be fetched; reported before the first byte of weights.

    Attributes:
        model_id: Identity of the model, independent of where it comes from.
        revision: Commit of the hub repository, or version of the package.
        licence: Identifier as its publisher states it; "unknown" when it states none.
        source: Where it comes from, in words.
        download_bytes: What the network has to carry.
        disk_bytes: What the place needs free while it is being fetched.
        place: Folder that will hold it.
        free_bytes: Free on that file system now.
    """

    model_id: str
    revision: str
    licence: str
    source: str
    download_bytes: int
    disk_bytes: int
    place: Path
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.model_id} ({self.licence}, revision {self.revision[:12]}) from {self.source}: "
            f"{megabytes(self.download_bytes)} to download, {megabytes(self.disk_bytes)} of disk in {self.place} "
            f"({megabytes(self.free_bytes)} free)"
        )


class Progress(NamedTuple):
    """How far one task has come; `total` is 0 while it is unknown."""

    task: str
    done: int
    total: int
    unit: str


class Reporter(Protocol):
    """Receives a plan, then notes and progress, from whatever thread does the work."""

    def plan(self, plan: Plan) -> None:
        """Called once before anything of size is fetched."""

    def note(self, line: str) -> None:
        """One line worth knowing: a fallback, a wait, a phase."""

    def progress(self, progress: Progress) -> None:
        """Called at least every two seconds while a task runs."""


class LogReporter:
    """Reports through `logging`, progress at most every `interval_s`."""

    def __init__(self, interval_s: float = 4.0) -> None:
        self._interval_s = interval_s
        self._last_s = -math.inf

    def plan(self, plan: Plan) -> None:
        logger.info("%s", plan)

    def note(self, line: str) -> None:
        logger.info("%s", line)

    def progress(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < self._interval_s:
            return
        self._last_s = now_s
        if progress.unit == "B":
            logger.info("%s: %s of %s", progress.task, megabytes(progress.done), megabytes(progress.total))
        else:
            logger.info("%s: %d of %d %s", progress.task, progress.done, progress.total, progress.unit)


def megabytes(count: int) -> str:
    """`count` bytes in decimal MB or GB, as download pages state them."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
