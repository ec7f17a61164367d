"""What a check found: one line, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    """A stack starts, and something is not as it should be."""
    PROBLEM = "problem"
    """A stack does not start, or cannot serve."""


@dataclass(frozen=True, slots=True)
class Finding:
    """
    Attributes:
        check: what was looked at, in a word or two.
        text: what is the case.
        remedy: what to do; "" where nothing is to be done.
    """

    level: Level
    check: str
    text: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        return {"check": self.check, "level": self.level.value, "text": self.text, "remedy": self.remedy}


def ok(check: str, text: str) -> Finding:
    return Finding(Level.OK, check, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, check, text, remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    return Finding(Level.PROBLEM, check, text, remedy)
