"""How many tokens each stream drafts in its next round: the seam, and the choices that an operator fixes.

`auto_gamma.Auto` chooses by what is measured. Everything here is decided before the slots concerned exist, so no choice
can bias the emitted law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outrider.errors import InvalidArgument


class Controller(Protocol):
    """Chooses gamma for every round; 0 means plain decoding."""

    @property
    def least_survival(self) -> float:
        """Chance of surviving below which a further slot is not worth its time, as far as the draft can tell."""

    def choose(self, stream_ids: Sequence[int], limits: Sequence[int]) -> list[int]:
        """The gammas of the streams that start a round now; `limits` is what each may draft at most."""

    def wants(self, stream_id: int) -> bool:
        """Whether a stream that is decoded plainly should go over to drafting."""

    def finished(self, stream_id: int, asked: int, proposed: int, accepted: int) -> None:
        """A round that asked for `asked` slots (0: a plain one) was given `proposed`; `accepted` were accepted."""

    def forget(self, stream_id: int) -> None:
        """The stream ended."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same gamma for every round, as far as the stream's limit allows."""

    gamma: int

    @property
    def least_survival(self) -> float:
        return 0.0

    def choose(self, stream_ids: Sequence[int], limits: Sequence[int]) -> list[int]:
        return [min(self.gamma, limit) for limit in limits]

    def wants(self, stream_id: int) -> bool:
        return self.gamma > 0

    def finished(self, stream_id: int, asked: int, proposed: int, accepted: int) -> None:
        pass

    def forget(self, stream_id: int) -> None:
        pass


class SizeRange(NamedTuple):
    """Batches of `first` to `last` streams draft `gamma` tokens."""

    first: int
    last: int
    gamma: int


@dataclass(frozen=True, slots=True)
class BySize:
    """A gamma by the number of streams being decoded, as `num_speculative_tokens_per_batch_size` gives it.

    Between two ranges and beyond the last one, the range below holds.

    Attributes:
        ranges: rising from 1.
        streams: how many are being decoded now.
    """

    ranges: tuple[SizeRange, ...]
    streams: Callable[[], int]

    @property
    def least_survival(self) -> float:
        return 0.0

    def choose(self, stream_ids: Sequence[int], limits: Sequence[int]) -> list[int]:
        return [min(self._gamma(), limit) for limit in limits]

    def wants(self, stream_id: int) -> bool:
        return self._gamma() > 0

    def finished(self, stream_id: int, asked: int, proposed: int, accepted: int) -> None:
        pass

    def forget(self, stream_id: int) -> None:
        pass

    def _gamma(self) -> int:
        streams = max(1, self.streams())
        return [part.gamma for part in self.ranges if part.first <= streams][-1]


def size_ranges(table: object, largest_gamma: int) -> tuple[SizeRange, ...]:
    """A checked `num_speculative_tokens_per_batch_size`: `[[first, last, gamma], ...]`, both ends included.

    Raises:
        InvalidArgument: it is not a list of such triples, does not begin at 1, is out of order or overlaps.
    """
    name = "num_speculative_tokens_per_batch_size"
    if not isinstance(table, list | tuple) or not table:
        raise InvalidArgument(name, f"must be a list of [first, last, gamma], got {table!r}")
    ranges: list[SizeRange] = []
    for entry in table:
        whole = isinstance(entry, list | tuple) and len(entry) == 3 and all(type(part) is int for part in entry)
        if not whole:
            raise InvalidArgument(name, f"{entry!r} is not [first, last, gamma], three whole numbers")
        part = SizeRange(*entry)
        least = ranges[-1].last + 1 if ranges else 1
        if part.first < least or part.last < part.first or (not ranges and part.first != 1):
            raise InvalidArgument(name, f"{list(part)}: ranges begin at 1 and rise without overlapping")
        if not 0 <= part.gamma <= largest_gamma:
            raise InvalidArgument(name, f"{list(part)}: gamma must be from 0 to {largest_gamma}")
        ranges.append(part)
    return tuple(ranges)
