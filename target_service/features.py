"""Features kept for drafts: the hidden states of each stream's last positions, in a ring in host memory.

The ring makes every question answerable without computing anything again: a draft that restarted, a lost message, the
return from a plain run. It is cut whenever the stream's KV is, since a row depends on the same prefix as its KV. Only a
draft that comes when a stream is under way has its first window computed once more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engine.span import Span
from outrider.features import FeatureBlock, FeatureRequest

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 30
"""Rings of all streams together; beyond it further streams get none, which costs their drafts and nothing else."""


SPARE_ROWS = 32


class HiddenStates(Protocol):
    """What the engine knows of the latest pass; see `outrider.engine.hidden_states`."""

    count: int
    width: int

    def want(self, layers: Sequence[int]) -> None: ...
    def rows(self, layers: Sequence[int], rows: NDArray[np.int64]) -> NDArray[np.uint8]: ...


class FeatureRing:
    """Rows [first, end) of one stream's last positions.

    Args:
        request: what they are.
        row_bytes: of each.
        spare: rows beside the window. Those of drafted tokens push out as many old ones before they are rejected.

    Attributes:
        request: as given.
        first, end: positions.
    """

    __slots__ = ("_rows", "end", "first", "request")

    def __init__(self, request: FeatureRequest, row_bytes: int, spare: int = SPARE_ROWS) -> None:
        self.request = request
        self.first = self.end = 0
        self._rows = np.empty((request.window + spare, row_bytes), np.uint8)

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
        kept = rows[-len(self._rows) :]
        self._rows[np.arange(self.end - len(kept), self.end) % len(self._rows)] = kept
        self.first = max(self.first, self.end - len(self._rows))

    def cut(self, length: int) -> None:
        """Forgets the rows of positions from `length` on."""
        self.end = min(self.end, length)
        self.first = min(self.first, self.end)

    def block(self, start: int, end: int) -> FeatureBlock | None:
        """A copy of what there is of [start, end), at most a window; None if that is nothing."""
        end = min(end, self.end)
        start = max(start, self.first, end - self.request.window)
        if start >= end:
            return None
        return FeatureBlock(start, self._rows[np.arange(start, end) % len(self._rows)])


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
        self._unmet: set[FeatureRequest] = set()

    def ring(self, request: FeatureRequest) -> FeatureRing | None:
        """A ring for one stream; None while there is no memory for it, or if the model has no such hidden states.

        Neither is an error: coordinators compare what a draft wants with what the target has before they ask.
        """
        hidden_states = self._hidden_states
        if hidden_states is None or max(request.layers) > hidden_states.count or not hidden_states.count:
            if request not in self._unmet:
                self._unmet.add(request)
                log.warning("hidden states of layers %s are wanted, which this target does not have", request.layers)
            return None
        ring = FeatureRing(request, request.row_bytes(hidden_states.width))
        if self.held_bytes + ring.nbytes > self._most_bytes:
            return None
        hidden_states.want(request.layers)
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
