"""Features kept for drafts: the hidden states of each stream's last positions, in a ring in host memory.

The ring makes every question answerable without computing anything again: a draft that restarted, a lost message, the
return from a plain run. It is cut whenever the stream's KV is, since a row depends on the same prefix as its KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engine.span import Span
from outrider.errors import InvalidArgument
from outrider.features import FeatureBlock, FeatureRequest

MOST_BYTES = 1 << 30
"""Rings of all streams together; beyond it further streams get none, which costs their drafts and nothing else."""


class HiddenStates(Protocol):
    """What the engine knows of the latest pass; see `outrider.engine.hidden_states`."""

    count: int
    width: int

    def want(self, layers: Sequence[int]) -> None: ...
    def rows(self, layers: Sequence[int], rows: NDArray[np.int64]) -> NDArray[np.uint8]: ...


class FeatureRing:
    """Rows [first, end) of one stream, at most `window` of them.

    Attributes:
        request: what they are.
        first, end: positions.
    """

    __slots__ = ("_rows", "end", "first", "request")

    def __init__(self, request: FeatureRequest, row_bytes: int) -> None:
        self.request = request
        self.first = self.end = 0
        self._rows = np.empty((request.window, row_bytes), np.uint8)

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return self._rows.nbytes

    def put(self, first: int, rows: NDArray[np.uint8]) -> None:
        """Takes rows that replace everything from position `first` on; behind a gap the ring begins anew."""
        self.cut(first)
        if self.end != first:
            self.first = first
        self.end = first + len(rows)
        kept = rows[-self.request.window :]
        self._rows[np.arange(self.end - len(kept), self.end) % self.request.window] = kept
        self.first = max(self.first, self.end - self.request.window)

    def cut(self, length: int) -> None:
        """Forgets the rows of positions from `length` on."""
        self.end = min(self.end, length)
        self.first = min(self.first, self.end)

    def block(self, start: int, end: int) -> FeatureBlock | None:
        """A copy of what there is of [start, end); None if that is nothing."""
        start, end = max(start, self.first), min(end, self.end)
        if start >= end:
            return None
        return FeatureBlock(start, self._rows[np.arange(start, end) % self.request.window])


class Fed(NamedTuple):
    """A span of a stream with a ring, and where its rows begin in the pass."""

    ring: FeatureRing
    span: Span
    row: int


class FeatureKeeper:
    """The rings of all streams. Used in the engine thread only.

    Args:
        hidden_states: of the model; None for one that has none.
        most_bytes: of all rings together.

    Attributes:
        held_bytes: of all rings together, now.
    """

    def __init__(self, hidden_states: HiddenStates | None, most_bytes: int = MOST_BYTES) -> None:
        self._hidden_states = hidden_states
        self._most_bytes = most_bytes
        self.held_bytes = 0

    def ring(self, request: FeatureRequest) -> FeatureRing | None:
        """A ring for one stream; None while there is no memory for it.

        Raises:
            InvalidArgument: the model has no such hidden states.
        """
        hidden_states = self._hidden_states
        if hidden_states is None or not hidden_states.count:
            raise InvalidArgument("feature_request", "this target returns no hidden states")
        outside = [layer for layer in request.layers if layer >= hidden_states.count]
        if outside:
            raise InvalidArgument(
                "feature_request.layers", f"{outside[0]} of a model with {hidden_states.count} layers"
            )
        row_bytes = request.row_bytes(hidden_states.width)
        if self.held_bytes + request.window * row_bytes > self._most_bytes:
            return None
        hidden_states.want(request.layers)
        ring = FeatureRing(request, row_bytes)
        self.held_bytes += ring.nbytes
        return ring

    def release(self, ring: FeatureRing | None) -> None:
        """The stream of a ring has ended."""
        if ring is not None:
            self.held_bytes -= ring.nbytes

    def record(self, fed: Sequence[Fed]) -> None:
        """Takes the rows of the pass that has just ended."""
        by_layers: dict[tuple[int, ...], list[Fed]] = {}
        for one in fed:
            by_layers.setdefault(one.ring.request.layers, []).append(one)
        for layers, members in by_layers.items():
            assert self._hidden_states is not None, "a ring is of a model with hidden states"
            kept = [min(len(one.span.tokens), one.ring.request.window) for one in members]
            rows = [
                np.arange(one.row + len(one.span.tokens) - n, one.row + len(one.span.tokens))
                for one, n in zip(members, kept, strict=True)
            ]
            states = self._hidden_states.rows(layers, np.concatenate(rows))
            start = 0
            for one, n in zip(members, kept, strict=True):
                one.ring.put(one.span.start + len(one.span.tokens) - n, states[start : start + n])
                start += n
