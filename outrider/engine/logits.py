"""From raw logits to p, the distribution that plain decoding samples from.

`process` is the one function for plain steps and for verify rows. The order: grammar, allowed ids, logit bias, bad
words, min_tokens; repetition, presence, frequency penalties; temperature; min_p; top_k; top_p. `greedy` takes the same
edits and then an argmax.
A row's result depends on that row alone, never on the rows beside it. Ties go to the lowest id everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        faults: row index -> why that row has no distribution.
    """

    p: Tensor
    faults: dict[int, OutriderError]


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
    """Rows of p, and which of them are no distributions."""

    p: Tensor
    faulty: list[int]


def process(logits: Tensor, rows: Sequence[RowContext]) -> Processed:
    """The distribution of each row; the logits stay as they are.

    Args:
        logits: [rows, vocab] float32.
        rows: one per row.
    """
    groups: dict[_Shape, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(_shape(row, logits.shape[1]), []).append(i)
    faults: dict[int, OutriderError] = {}
    p = torch.empty_like(logits)
    for shape, members in groups.items():
        block = _edited(logits, rows, members, plain=shape.plain)
        part, faulty = _one_hot(block) if shape.greedy else _distribution(block, shape)
        for i in faulty:
            faults[members[i]] = _fault(logits[members[i]], rows[members[i]])
            part[i] = 0
        if len(members) == len(rows):
            p = part
        else:
            p[indices(members, logits.device)] = part
    return Processed(p, faults)


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
            bad, ids[members] = read(_is_faulty(best.values[:, 0]), best.ids[:, 0])
            faults.update(
                (members[i], _fault(logits[members[i]], rows[members[i]])) for i in np.flatnonzero(bad).tolist()
            )
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


def _faulty(witness: Tensor) -> list[int]:
    """The rows where `_is_faulty` holds."""
    (bad,) = read(_is_faulty(witness))
    found: list[int] = np.flatnonzero(bad).tolist()
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
    return _Block(torch.zeros_like(logits).scatter_(1, best.ids, 1.0), _faulty(best.values[:, 0]))


def _distribution(logits: Tensor, shape: _Shape) -> _Block:
    p = torch.softmax(logits if shape.temperature == 1 else logits / shape.temperature, dim=-1)
    # A softmax spoils its whole row when it meets NaN, +inf or nothing finite: any entry tells.
    faulty = _faulty(p[:, 0])
    return _Block(p if shape.filters == Filters() else cut(p, shape.filters), faulty)
