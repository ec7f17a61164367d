"""What a draft has been sent of the target's features, and how far it has used it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.features import FeatureBlock

# A bfloat16 is infinite or not a number where all bits of its exponent are set.
_EXPONENT = np.uint16(0x7F80)


@dataclass(slots=True)
class Known:
    """The features of one stream.

    Attributes:
        first: position of the first row that is still here.
        rows: uint8 [rows, row bytes].
        origin: first row of the unbroken chain of rows that were fed with features.
        fed: position behind its last row.
    """

    first: int
    rows: NDArray[np.uint8]
    origin: int
    fed: int

    @property
    def end(self) -> int:
        """Position behind the last row."""
        return self.first + len(self.rows)


class FeatureStore:
    """The features of all streams, at most a window of each. Used in the engine thread only.

    Args:
        row_bytes: of the rows that the draft can use.
        window: rows kept per stream.
    """

    def __init__(self, row_bytes: int, window: int) -> None:
        self.row_bytes = row_bytes
        self.window = window
        self._known: dict[int, Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    @property
    def held_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(known.rows.nbytes for known in list(self._known.values()))

    def get(self, stream_id: int) -> Known | None:
        return self._known.get(stream_id)

    def forget(self, stream_id: int) -> None:
        self._known.pop(stream_id, None)

    def put(self, stream_id: int, block: FeatureBlock) -> bool:
        """Adds rows; those from the same position on are replaced. Rows that do not continue the known ones begin anew.

        Returns:
            Whether they were usable: of the right width, and finite.
        """
        if block.rows.shape[1] != self.row_bytes or not _finite(block.rows):
            return False
        if not len(block.rows):
            return True
        known = self._known.get(stream_id)
        if known is None or not known.first <= block.first <= known.end:
            self._known[stream_id] = Known(block.first, block.rows, block.first, block.first)
        else:
            known.rows = np.concatenate((known.rows[: block.first - known.first], block.rows))
        self._trim(self._known[stream_id], self.window)
        return True

    def used(self, known: Known, end: int) -> None:
        """Rows below `end` have been fed; the last of them is kept, because it may have to be fed again."""
        known.fed = max(known.fed, end)
        self._trim(known, known.end - known.fed + 1)

    @staticmethod
    def _trim(known: Known, rows: int) -> None:
        surplus = len(known.rows) - rows
        if surplus > 0:
            known.first += surplus
            # A copy, so that the message that the rows came in can go.
            known.rows = known.rows[surplus:].copy()


def _finite(rows: NDArray[np.uint8]) -> bool:
    bits = np.ascontiguousarray(rows).view(np.uint16)
    return not ((bits & _EXPONENT) == _EXPONENT).any()
