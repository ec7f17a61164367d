"""Log-probabilities of raw logits rows: what a step's streams asked for, from before any parameter touches a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.span import Span
from outrider.engine.top import at_least, largest
from outrider.engine.transfer import indices, read, to_device
from outrider.logprobs import LogprobRows, joined
from outrider.seam import StreamOpen
from target_service.round import Verdict

F32 = NDArray[np.float32]
U32 = NDArray[np.uint32]

_CHUNK = 1 << 26
"""Logits worked on at once: 256 MB of float32."""
_FLOOR = 1e38
_NO_TOKEN = 2**32 - 1
"""Outside every vocabulary."""


class Wanted(NamedTuple):
    """What one block is made of.

    Attributes:
        own_rows, own_ids: parallel; the row and the token of each value.
        rows: rows whose most probable ids are wanted.
        k: how many of them.
    """

    own_rows: Sequence[int]
    own_ids: Sequence[int]
    rows: Sequence[int]
    k: int


class RawRows:
    """Log-softmax of some rows of a step without keeping it: a value is its logit minus two numbers of its row.

    Made before padding is masked, so that the values are the model's own; `take` leaves masked ids out of the tops. A
    row's numbers depend on that row alone.
    """

    def __init__(self, logits: Tensor, rows: Sequence[int]) -> None:
        """`rows` of the logits [n, vocab] are those that `take` may be asked for."""
        self._logits = logits
        self._place = {row: place for place, row in enumerate(rows)}
        index = indices(list(rows), logits.device)
        largest_ids, log_sums = [], []
        for part in index.split(max(_CHUNK // logits.shape[1], 1)):
            taken = logits[part]
            top = taken.argmax(dim=1, keepdim=True)
            largest_ids.append(taken.gather(1, top))
            # At the largest logit log-softmax is minus the logarithm of the sum that it divides by.
            log_sums.append(-torch.log_softmax(taken, dim=1).gather(1, top))
        self._maximum = torch.cat(largest_ids)
        self._log_sum = torch.cat(log_sums)

    def take(self, wanted: Sequence[Wanted]) -> list[LogprobRows]:
        """The values of each block."""
        vocab, device = self._logits.shape[1], self._logits.device
        own_rows = [row for block in wanted for row in block.own_rows]
        ids = indices([token for block in wanted for token in block.own_ids], device)
        values = self._logits[indices(own_rows, device), ids.clamp(max=vocab - 1)]
        own = self._normalised(values[:, None], own_rows).squeeze(1).masked_fill_(ids >= vocab, -torch.inf)
        own_values = own.cpu().numpy()
        rows = [row for block in wanted for row in block.rows]
        top_ids, top = self._tops(rows, min(max((block.k for block in wanted), default=0), vocab))
        blocks, own_at, row_at = [], 0, 0
        for block in wanted:
            own_end, row_end = own_at + len(block.own_rows), row_at + len(block.rows)
            blocks.append(
                LogprobRows(
                    own_values[own_at:own_end],
                    np.ascontiguousarray(top_ids[row_at:row_end, : block.k]),
                    np.ascontiguousarray(top[row_at:row_end, : block.k]),
                )
            )
            own_at, row_at = own_end, row_end
        return blocks

    def _tops(self, rows: Sequence[int], k: int) -> tuple[U32, F32]:
        """Ids and values [rows, k], falling by value, equal ones rising by id."""
        if not (k and rows):
            return np.empty((len(rows), k), np.uint32), np.empty((len(rows), k), np.float32)
        index = indices(list(rows), self._logits.device)
        kept_ids, kept_values = [], []
        for part in index.split(max(_CHUNK // self._logits.shape[1], 1)):
            # Finite everywhere, so that every row has k largest values.
            taken = torch.nan_to_num(self._logits[part], nan=-_FLOOR, neginf=-_FLOOR, posinf=_FLOOR)
            row, ids = at_least(taken, largest(taken, k).values[:, -1:])
            # All that reach the k-th value; of those that equal it only the lowest ids are kept.
            values = taken[row, ids]
            row_, ids_, values_ = read(row, ids, values)
            order = np.lexsort((ids_, -values_, row_))
            first = np.searchsorted(row_, np.arange(len(part)))
            chosen = order[first[:, None] + np.arange(k)]
            kept_ids.append(ids_[chosen].astype(np.uint32))
            kept_values.append(values_[chosen])
        values = self._normalised(to_device(np.concatenate(kept_values), self._logits.device), rows)
        return np.concatenate(kept_ids), values.cpu().numpy()

    def _normalised(self, values: Tensor, rows: Sequence[int]) -> Tensor:
        """[n, k] logits of [n] rows as log-probabilities."""
        places = indices([self._place[row] for row in rows], values.device)
        return values - self._maximum[places] - self._log_sum[places]


def of_round(opened: StreamOpen, first: int, x: Sequence[int], slots: int, verdict: Verdict) -> Wanted:
    """A round's block: each token that may be emitted on the row before it.

    Args:
        first: row of the round's first token.
        x: drafted tokens that were fed.
        slots: answered slots: as many as fed ones, and one more whose token the target does not have.
        verdict: on the round.
    """
    last = first + len(x)
    slot_rows = [first + slot for slot in range(slots)]
    drafted = [*x, *([_NO_TOKEN] * (slots - len(x)))]
    rows = [min(first + slot, last) for slot in range(slots + 1)]
    return Wanted(
        [*slot_rows, *slot_rows, rows[-1]],
        [*drafted, *verdict.emit.tolist(), verdict.bonus],
        rows,
        opened.logprobs or 0,
    )


class PromptScores:
    """The log-probabilities of one stream's prompt, collected while it is read.

    Row t scores the token at position t + 1; the prompt's last row belongs to the first round.

    Attributes:
        read: positions whose rows have been scored, from 0 on.
    """

    def __init__(self, k: int) -> None:
        self.read = 0
        self._k = k
        self._parts: list[LogprobRows] = []

    def complete(self, prompt_length: int) -> bool:
        """Whether all is there."""
        return self.read >= prompt_length - 1

    def restart(self) -> None:
        """The prompt is read anew."""
        self.read = 0
        self._parts = []

    def wanted(self, span: Span, first: int, tokens: Sequence[int]) -> Wanted:
        """The block that a span of this stream adds.

        Args:
            first: row of the span's first token.
            tokens: the stream's.
        """
        end = min(span.start + len(span.tokens), span.prompt_len - 1)
        rows = [first + position - span.start for position in range(span.start, end)]
        return Wanted(rows, tokens[span.start + 1 : end + 1], rows, self._k)

    def add(self, span: Span, part: LogprobRows) -> None:
        """Takes in what was wanted."""
        self.read = span.start + len(span.tokens)
        self._parts.append(part)

    def rows(self) -> LogprobRows:
        """All of it."""
        none = LogprobRows(
            np.empty(0, np.float32), np.empty((0, self._k), np.uint32), np.empty((0, self._k), np.float32)
        )
        return joined(self._parts or [none])
