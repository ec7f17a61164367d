"""Head: one decoder layer that continues the target's own hidden states, whatever kind it is.

A row of a head stands for position t. It is fed the embedding of token t + 1 and a hidden state for position t, and its
logits are q for token t + 2. Where the target has passed position t, the hidden state is `fuse(features)`; further on
it is `carry` of the head's own output for the row before. The head computes, it does not remember: attention is the
caller's, given as a function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over what the caller keeps, with scores scaled by width ** -0.5: query [rows, heads, width], key [rows,
kv_heads, width] and value [rows, kv_heads, value_width] of the new rows, rotated; gives [rows, heads, value_width]."""


class HeadShape(NamedTuple):
    """What a caller must keep room for.

    Attributes:
        hidden: width of what is carried from row to row.
        kv_heads, width, value_width: of the keys and values.
    """

    hidden: int
    kv_heads: int
    width: int
    value_width: int


class Head(Protocol):
    """What `HeadModel` runs."""

    @property
    def shape(self) -> HeadShape: ...

    @property
    def target_ids(self) -> Tensor:
        """int64 [draft ids] the target's id of each column of the logits, rising."""
        ...

    def fuse(self, features: Tensor) -> Tensor:
        """[rows, layers x target's width] features of the target to [rows, hidden]."""
        ...

    def __call__(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step over any rows: [rows, hidden] for `carry` and `logits`."""
        ...

    def key_value(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values alone, for rows whose output nobody reads."""
        ...

    def carry(self, output: Tensor) -> Tensor:
        """[rows, hidden] the next row's hidden state."""
        ...

    def logits(self, output: Tensor) -> Tensor:
        """[rows, draft ids]."""
        ...
