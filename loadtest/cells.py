"""The grid of a sweep, and what was measured in each cell."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from loadtest.outcome import Outcome
from loadtest.series import Snapshot
from outrider.errors import InvalidArgument

Gamma = int | Literal["auto"]


class Cell(NamedTuple):
    """One point of the grid.

    Attributes:
        batch: streams that decode at once.
        gamma: drafted tokens per round; 0 is plain decoding, "auto" the server's own choice.
        context: tokens of the prompt, or 0 for the prompts as they are.
    """

    batch: int
    gamma: Gamma
    context: int

    def __str__(self) -> str:
        context = f", context {self.context}" if self.context else ""
        return f"batch {self.batch}, gamma {self.gamma}{context}"


@dataclass(frozen=True, slots=True)
class Visit:
    """One measurement of a cell.

    Attributes:
        rates: tokens per second of each stream, in the window in which all of them decode.
        seconds: of that window; of all groups together where several small batches ran one after the other.
        rounds: of all streams within it.
        series: what the server counted meanwhile; None where it exports nothing.
        outcomes: of the requests.
        total_s: from the first request of a group to its last answer, over all groups.
    """

    rates: tuple[float, ...]
    seconds: float
    rounds: int
    series: Snapshot | None
    outcomes: tuple[Outcome, ...]
    total_s: float = 0.0


@dataclass(slots=True)
class CellResult:
    """All visits of a cell, in order of the passes; `refusal` is why there are no more."""

    cell: Cell
    visits: list[Visit] = field(default_factory=list)
    refusal: str | None = None

    @property
    def rates(self) -> list[tuple[float, ...]]:
        return [visit.rates for visit in self.visits]


@dataclass(frozen=True, slots=True)
class Grid:
    """What is swept. Plain decoding (gamma 0) always belongs to it: everything is compared with it."""

    batches: tuple[int, ...]
    gammas: tuple[Gamma, ...]
    contexts: tuple[int, ...] = (0,)

    @property
    def cells(self) -> list[Cell]:
        return [
            Cell(batch, gamma, context) for context in self.contexts for batch in self.batches for gamma in self.gammas
        ]

    def order(self, rng: random.Random, blocks: Sequence[tuple[int, int]] | None = None) -> list[list[Cell]]:
        """One pass: blocks of the same batch and context in random order, and in each all gammas in random order.

        So a slow moment of the machine hits all arms of a block, and no arm always comes first.
        """
        wanted = list(blocks or [(batch, context) for batch in self.batches for context in self.contexts])
        rng.shuffle(wanted)
        return [
            [Cell(batch, gamma, context) for gamma in rng.sample(self.gammas, len(self.gammas))]
            for batch, context in wanted
        ]


def parse_grid(batch: str, gamma: str, context: str) -> Grid:
    """Read comma-separated lists.

    Raises:
        InvalidArgument: a value is no number, out of range, or the list is empty.
    """
    batches = _numbers("batch", batch, 1)
    gammas: list[Gamma] = [
        "auto" if part.strip() == "auto" else _number("gamma", part, 0) for part in _parts("gamma", gamma)
    ]
    return Grid(
        tuple(sorted(set(batches))),
        tuple(dict.fromkeys([0, *gammas])),
        tuple(sorted(set(_numbers("context", context, 0)))),
    )


def speculation_field(gamma: Gamma) -> dict[str, Any]:
    """The body field that makes one request run under this gamma."""
    if gamma == "auto":
        return {}
    if gamma == 0:
        return {"speculative": {"enabled": False}}
    return {"speculative": {"enabled": True, "num_speculative_tokens": gamma}}


def _numbers(name: str, text: str, least: int) -> list[int]:
    return [_number(name, part, least) for part in _parts(name, text)]


def _parts(name: str, text: str) -> list[str]:
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise InvalidArgument(name, "is empty")
    return parts


def _number(name: str, text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise InvalidArgument(name, f"{text.strip()!r} is no integer of at least {least}")
    return number
