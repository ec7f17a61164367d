"""From raw logits to p, the distribution that plain decoding samples from.

`process` is the one function for plain steps and for verify rows. The order: grammar, allowed ids, logit bias, bad
words, min_tokens; repetition, presence, frequency penalties; temperature; min_p; top_k; top_p. `greedy` takes the same
edits and then an argmax.
A row's result depends on that row alone, never on the rows beside it. Ties go to the lowest id everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.edits import RowContext, edit
from outrider.engine.filters import Filters, cut
from outrider.engine.top import argmax
from outrider.engine.transfer import indices, read
from outrider.errors import InvalidArgument, NonFiniteLogits, OutriderError


class Processed(NamedTuple):
    """Distributions after all request parameters.

    Attributes:
        p: [rows, vocab] float32, each row summing to 1 (a row of zeros where there is a fault).
        faults: row index -> why that row has no distribution. Looked for when first asked for, which waits for the
            device: so after what is drawn from p has been read.
    """

    p: Tensor
    faults: Mapping[int, OutriderError]


class Choice(NamedTuple):
    """Greedy tokens: int64 [rows] ids (meaningless where there is a fault), and the faults."""

    ids: NDArray[np.int64]
    faults: dict[int, OutriderError]


class _Shape(NamedTuple):
    """What rows must share to be processed together."""

    plain: bool
    greedy: bool
    temperature: float
    filters: Filters


class _Block(NamedTuple):
    """Rows of p, and which of them are no distributions, bool [rows]."""

    p: Tensor
    faulty: Tensor


class _Faults(Mapping[int, OutriderError]):
    """The faults among rows, read from the device when they are asked for."""

    def __init__(self, faulty: Tensor, logits: Tensor, rows: Sequence[RowContext]) -> None:
        self._faulty, self._logits, self._rows = faulty, logits, rows

    @cached_property
    def _found(self) -> dict[int, OutriderError]:
        return {row: _fault(self._logits[row], self._rows[row]) for row in _places(*read(self._faulty))}

    def __getitem__(self, row: int) -> OutriderError:
        return self._found[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def process(logits: Tensor, rows: Sequence[RowContext]) -> Processed:
    """The distribution of each row; the logits stay as they are.

    Args:
        logits: [rows, vocab] float32.
        rows: one per row.
    """
    groups: dict[_Shape, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(_shape(row, logits.shape[1]), []).append(i)
    p, faulty = torch.empty_like(logits), torch.empty(len(rows), dtype=torch.bool, device=logits.device)
    for shape, members in groups.items():
        edited = _edited(logits, rows, members, plain=shape.plain)
        block = _one_hot(edited) if shape.greedy else _distribution(edited, shape)
        if block.p.is_cuda:
            block.p.masked_fill_(block.faulty[:, None], 0.0)
        elif block.faulty.any():
            block.p[block.faulty] = 0.0
        if len(members) == len(rows):
            p, faulty = block
        else:
            places = indices(members, logits.device)
            p[places], faulty[places] = block
    return Processed(p, _Faults(faulty, logits, rows))


def greedy(logits: Tensor, rows: Sequence[RowContext]) -> Choice:
    """The token of each row at temperature 0: the argmax after the edits, ties to the lowest id.

    Args:
        logits: [rows, vocab] float32.
        rows: one per row; their temperature and filters are not looked at.
    """
    ids = np.empty(len(rows), np.int64)
    faults: dict[int, OutriderError] = {}
    for plain in (True, False):
        members = [i for i, row in enumerate(rows) if row.params.plain is plain]
        if members:
            best = argmax(_edited(logits, rows, members, plain=plain))
            faulty, ids[members] = read(_is_faulty(best.values[:, 0]), best.ids[:, 0])
            faults.update((members[i], _fault(logits[members[i]], rows[members[i]])) for i in _places(faulty))
    return Choice(ids, faults)


def _shape(row: RowContext, vocab: int) -> _Shape:
    params = row.params
    if params.greedy:
        return _Shape(params.plain, True, 0.0, Filters())
    top_k = params.top_k if 0 < params.top_k < vocab else 0
    return _Shape(params.plain, False, params.temperature, Filters(params.min_p, top_k, params.top_p))


def _edited(logits: Tensor, rows: Sequence[RowContext], members: list[int], *, plain: bool) -> Tensor:
    """The members' logits after their edits; a view where nothing has to be copied."""
    first, last = members[0], members[-1]
    if last - first + 1 == len(members):
        block = logits[first : last + 1]
    else:
        block = logits[indices(members, logits.device)]
    return block if plain else edit(block, [rows[i] for i in members])


def _is_faulty(witness: Tensor) -> Tensor:
    """bool [rows]: any probability, or the largest logit, betrays NaN, +inf or a row without a finite logit."""
    return ~torch.isfinite(witness)


def _places(flags: NDArray[np.bool_]) -> list[int]:
    found: list[int] = np.flatnonzero(flags).tolist()
    return found


def _fault(raw: Tensor, row: RowContext) -> OutriderError:
    if torch.isnan(raw).any() or not torch.isfinite(raw.max()):
        return NonFiniteLogits("the model's logits are NaN, +inf, or without any finite value")
    if row.matcher is not None:
        return InvalidArgument("grammar", "with the request's other masks and the model's own no token is left to draw")
    return InvalidArgument(
        "allowed_token_ids", "with bad_words, min_tokens and the model's own masks no token is left to draw"
    )


def _one_hot(logits: Tensor) -> _Block:
    best = argmax(logits)
    return _Block(torch.zeros_like(logits).scatter_(1, best.ids, 1.0), _is_faulty(best.values[:, 0]))


def _distribution(logits: Tensor, shape: _Shape) -> _Block:
    p = torch.softmax(logits if shape.temperature == 1 else logits / shape.temperature, dim=-1)
    # A softmax spoils its whole row when it meets NaN, +inf or nothing finite: any entry tells.
    faulty = _is_faulty(p[:, 0])
    return _Block(p if shape.filters == Filters() else cut(p, shape.filters), faulty)
