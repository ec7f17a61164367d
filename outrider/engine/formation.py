"""What the scheduler is told and what it says: work, KV room, and the formation of a step."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Pool(Protocol):
    """KV room by stream; the block manager seen from here."""

    def fits(self, *tokens: int) -> bool:
        """Whether an empty pool could hold streams of so many tokens each."""

    def admit(self, stream_id: int, work: Work, spare_blocks: int) -> int | None:
        """Makes room for a stream that holds nothing.

        Returns:
            How many of its first rows need not be fed because their KV was found; None, and nothing is taken, if blocks
            are lacking or if fewer than `spare_blocks` would stay free.
        """

    def grow(self, stream_id: int, tokens: int, spare_blocks: int) -> bool:
        """Makes room for a stream's first `tokens` tokens.

        False, and nothing is taken, if blocks are lacking or if fewer than `spare_blocks` would stay free.
        """

    def release(self, stream_id: int) -> None:
        """Frees all of a stream's blocks."""


class Work(NamedTuple):
    """What an item still needs.

    Attributes:
        tokens: tokens that will be cached when it is done (committed ones and fed slots).
        rows: token rows not fed yet.
        tail: rows of the last piece, whose logits are wanted; they ride in one step. More rows than these are prefill.
        scored: whether logits are wanted for all rows.
        most: tokens that the stream can ever hold, as far as it is known.
    """

    tokens: int
    rows: int
    tail: int
    scored: bool = False
    most: int = 0

    def after(self, rows: int) -> Work:
        """What is left when so many of its rows have been fed."""
        return self._replace(rows=self.rows - rows)

    def anew(self) -> Work:
        """The same when all KV is gone."""
        return self._replace(rows=self.tokens)

    @property
    def prefilling(self) -> bool:
        return self.rows > self.tail


class Piece(NamedTuple):
    """A stream's share of a step: its next `rows` rows; `last` where they complete the item."""

    stream_id: int
    rows: int
    last: bool


class Formation(NamedTuple):
    """What to do now.

    Attributes:
        pieces: the step; empty if there is nothing to run yet.
        wait_s: seconds to wait for streams on their way, unless something arrives; None to wait for the next message.
        refused: streams whose item can never fit in the pool. They are forgotten here.
    """

    pieces: tuple[Piece, ...] = ()
    wait_s: float | None = None
    refused: tuple[int, ...] = ()
