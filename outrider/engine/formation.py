"""What the scheduler is told and what it says: work, KV room, and the formation of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Pool(Protocol):
    """KV room by stream; the block manager seen from here."""

    def fits(self, tokens: int) -> bool:
        """Whether an empty pool could hold this many tokens of one stream."""

    def grow(self, stream_id: int, tokens: int, spare_blocks: int) -> bool:
        """Makes room for a stream's first `tokens` tokens.

        False, and nothing is taken, if blocks are lacking or if fewer than `spare_blocks` would stay free.
        """

    def release(self, stream_id: int) -> None:
        """Frees all of a stream's blocks."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an item still needs.

    Attributes:
        tokens: tokens that will be cached when it is done (committed ones and fed slots).
        rows: token rows not fed yet.
        tail: rows of the last piece, whose logits are wanted; they ride in one step. More rows than these are prefill.
    """

    tokens: int
    rows: int
    tail: int

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
        preempted: streams that lost their blocks and with them their place: their items are to be answered ABORTED.
        refused: streams whose item can never fit in the pool.

    Both are forgotten here; whoever sends them again opens them again.
    """

    pieces: tuple[Piece, ...] = ()
    wait_s: float | None = None
    preempted: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
