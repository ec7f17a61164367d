"""From raw logits to p, the distribution that plain decoding samples from.

`process` is the one function for plain steps and for verify rows. The order: allowed ids, logit bias, min_tokens;
repetition, presence, frequency penalties; temperature; min_p; top_k; top_p. `greedy` takes the same edits and then an
argmax.
A row's result depends on that row alone, never on the rows beside it.

Ties. Every choice between equal values falls on the lowest id: the argmax, the last id kept by top_k and by top_p.
top_p keeps the fewest ids whose share of the mass that min_p and top_k left reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.edits import RowContext, edit
from outrider.errors import InvalidArgument, NonFiniteLogits, OutriderError

# Sizes of the partial sorts tried in turn; rows whose cut lies behind the last get a full sort. On the CPU, 80 rows of
# 49,152 ids: 3 ms, 16 ms, and 127 ms for the full sort.
_TOP_SIZES = (64, 1024)


class Processed(NamedTuple):
    """Distributions after all request parameters.

    Attributes:
        p: [rows, vocab] float32, each row summing to 1 (a row of zeros where there is a fault).
        faults: row index -> why that row has no distribution.
    """

    p: Tensor
    faults: dict[int, OutriderError]


class Choice(NamedTuple):
    """Greedy tokens: int64 [rows] ids on the logits' device (meaningless where there is a fault), and the faults."""

    ids: Tensor
    faults: dict[int, OutriderError]


class _Shape(NamedTuple):
    """What rows must share to be processed together."""

    plain: bool
    greedy: bool
    temperature: float
    min_p: float
    top_k: int
    top_p: float


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
    p = logits.new_empty((0, logits.shape[1])) if not rows else None
    for shape, members in groups.items():
        block = _edited(logits, rows, members, plain=shape.plain)
        part = _one_hot(block) if shape.greedy else _distribution(block, shape)
        for i in _faulty(part[:, 0]):
            faults[members[i]] = _fault(logits[members[i]])
            part[i] = 0
        if len(groups) == 1:
            p = part
        else:
            p = torch.empty_like(logits) if p is None else p
            p[torch.tensor(members, device=logits.device)] = part
    assert p is not None
    return Processed(p, faults)


def greedy(logits: Tensor, rows: Sequence[RowContext]) -> Choice:
    """The token of each row at temperature 0: the argmax after the edits, ties to the lowest id.

    Args:
        logits: [rows, vocab] float32.
        rows: one per row; their temperature and filters are not looked at.
    """
    ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    faults: dict[int, OutriderError] = {}
    for plain in (True, False):
        members = [i for i, row in enumerate(rows) if row.params.plain is plain]
        if members:
            best = _edited(logits, rows, members, plain=plain).max(dim=1)
            faults.update((members[i], _fault(logits[members[i]])) for i in _faulty(best.values))
            ids[torch.tensor(members, device=logits.device)] = best.indices
    return Choice(ids, faults)


def _shape(row: RowContext, vocab: int) -> _Shape:
    params = row.params
    if params.greedy:
        return _Shape(params.plain, True, 0.0, 0.0, 0, 1.0)
    top_k = params.top_k if 0 < params.top_k < vocab else 0
    return _Shape(params.plain, False, params.temperature, params.min_p, top_k, params.top_p)


def _edited(logits: Tensor, rows: Sequence[RowContext], members: list[int], *, plain: bool) -> Tensor:
    """The members' logits after their edits; a view where nothing has to be copied."""
    first, last = members[0], members[-1]
    if last - first + 1 == len(members):
        block = logits[first : last + 1]
    else:
        block = logits[torch.tensor(members, device=logits.device)]
    return block if plain else edit(block, [rows[i] for i in members])


def _faulty(witness: Tensor) -> list[int]:
    """Rows whose witness (any probability, or the largest logit) betrays NaN, +inf or a row without a finite logit."""
    bad = ~torch.isfinite(witness)
    return bad.nonzero().flatten().tolist() if bad.any() else []


def _fault(raw: Tensor) -> OutriderError:
    if torch.isnan(raw).any() or not torch.isfinite(raw.max()):
        return NonFiniteLogits("the model's logits are NaN, +inf, or without any finite value")
    return InvalidArgument("allowed_token_ids", "with min_tokens and the model's own masks no token is left to draw")


def _one_hot(logits: Tensor) -> Tensor:
    best = logits.max(dim=1, keepdim=True)
    return torch.zeros_like(logits).scatter_(1, best.indices, torch.where(best.values.isfinite(), 1.0, math.nan))


def _distribution(logits: Tensor, shape: _Shape) -> Tensor:
    # A softmax spoils its whole row when it meets NaN, +inf or nothing finite: any entry tells.
    p = torch.softmax(logits if shape.temperature == 1 else logits / shape.temperature, dim=-1)
    if shape.min_p == 0 and shape.top_k == 0 and shape.top_p == 1:
        return p
    return _cut(p, shape)


def _cut(p: Tensor, shape: _Shape) -> Tensor:
    """Zeroes what min_p, top_k and top_p drop and renormalises. A row of NaN stays one."""
    out = torch.zeros_like(p)
    rows = torch.arange(len(p), device=p.device)
    for size in _sizes(shape, p.shape[1]):
        rest = p if len(rows) == len(p) else p[rows]
        is_open = _cut_within(rest, shape, size, out, rows)
        rows = rows[is_open]
        if not len(rows):
            break
    return out


def _sizes(shape: _Shape, vocab: int) -> Iterator[int]:
    # One id more than top_k keeps shows whether the cut falls between equal values.
    most = shape.top_k + 1 if shape.top_k else vocab
    yield from (size for size in _TOP_SIZES if size < most)
    yield most


def _cut_within(p: Tensor, shape: _Shape, size: int, out: Tensor, rows: Tensor) -> Tensor:
    """Cuts the rows whose kept ids are all among their `size` largest; bool [n], True for rows left to do.

    Args:
        p: [n, vocab] rows still to do.
        size: how many of the largest values to look at.
        out: [all, vocab] where finished rows go.
        rows: [n] index of each row in `out`.
    """
    whole = size == p.shape[1]
    if whole:
        values, ids = p.sort(dim=1, descending=True, stable=True)
    else:
        values, ids = p.topk(size, dim=1)
    ranks = torch.arange(size, device=p.device)
    alive = (values > 0) & (values >= shape.min_p * values[:, :1])
    if shape.top_k:
        alive &= ranks < shape.top_k
    mass = torch.where(alive, values, 0).cumsum(dim=1, dtype=torch.float64)
    count = alive.sum(dim=1)
    is_open = torch.zeros_like(alive[:, 0]) if whole else alive[:, -1].clone()
    if shape.top_p < 1:
        if shape.min_p == 0 and shape.top_k == 0:
            target = torch.full_like(mass[:, -1], shape.top_p)
            is_open &= mass[:, -1] < target
        else:
            target = shape.top_p * mass[:, -1]
        count = torch.minimum((mass < target[:, None]).sum(dim=1) + 1, count)
    last = (count - 1).clamp(min=0)[:, None]
    kept = torch.where(ranks < count[:, None], values / mass.gather(1, last), 0).to(p.dtype)
    # A partial sort leaves equal values in any order: where the cut falls between two of them, ids decide.
    behind = values.gather(1, count.clamp(max=size - 1)[:, None])
    threshold = values.gather(1, last)
    is_tied = ((behind == threshold) & ~is_open[:, None]).squeeze(1) if not whole else is_open
    done = ~is_open & ~is_tied
    out[rows[done]] = out[rows[done]].scatter(1, ids[done], kept[done])
    if is_tied.any():
        tied, level = p[is_tied], threshold[is_tied]
        wanted = count[is_tied][:, None] - (values[is_tied] > level).sum(dim=1, keepdim=True)
        equal = tied == level
        keep = (tied > level) | (equal & (equal.cumsum(dim=1) <= wanted))
        out[rows[is_tied]] = torch.where(keep, tied / mass.gather(1, last)[is_tied], 0).to(p.dtype)
    nan = torch.isnan(p[:, 0])
    if nan.any():
        out[rows[nan]] = math.nan
        is_open = is_open & ~nan
    return is_open
