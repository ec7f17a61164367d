"""Draws from rows that live on the model's device: the torch twins of `outrider.rule` and `outrider.noise`.

Rows are tensors; noise, ids and the sparse q are numpy arrays, because they come from and go to the wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.distribution import truncate
from outrider.engine.top import argmax, at_least, largest
from outrider.engine.transfer import read, to_device

F64 = NDArray[np.float64]
U64 = NDArray[np.uint64]
Ints = NDArray[np.int64]

# Elements worked on at once. On the CPU a few rows that stay in its cache; on a GPU a bound on the workspace.
_CPU_CHUNK = 1 << 18
_CUDA_CHUNK = 1 << 26

# Above this share of p removed by q the residual is checked for being empty.
_NEARLY_ALL = 0.99

# The words' second multiplier as a signed 32-bit integer; products of int32 tensors wrap around.
_FIRST_MULTIPLIER = 0x7FEB352D
_SECOND_MULTIPLIER = 0x846CA68B - (1 << 32)

# Rounding of a single-precision quotient of two single-precision numbers, with room to spare.
_ROUNDING = 1e-6


class DraftRows(NamedTuple):
    """q before quantising: [n, k] ids by falling probability, and their float64 [n, k] weights, 0 for ids left out."""

    ids: Ints
    probs: F64


def inverse_cdf(weights: Tensor, u: F64) -> Ints:
    """One token per row by inversion in id order, bit-identical to `rule.inverse_cdf` on the CPU.

    Args:
        weights: [n, vocab] not negative, not necessarily normalised.
        u: [n] uniforms on [0, 1).

    Returns:
        int64 [n] ids of positive weight; any id for a row that has none (a fault reported by `process`).
    """
    (ids,) = read(inverted(weights, u))
    return ids


def inverted(weights: Tensor, u: F64) -> Tensor:
    """As `inverse_cdf`, the ids left on the weights' device."""
    uniforms = to_device(u, weights.device)
    ids = torch.empty(len(u), dtype=torch.int64, device=weights.device)
    for rows in _chunks(weights):
        mass = weights[rows].cumsum(dim=1, dtype=torch.float64)
        target = uniforms[rows, None] * mass[:, -1:]
        ids[rows] = torch.searchsorted(mass, target, right=True).squeeze(1)
    return ids.clamp_(max=weights.shape[1] - 1)


def residual(p: Tensor, rows: NDArray[np.integer], ids: NDArray[np.integer], q: NDArray[np.floating]) -> Tensor:
    """The weights of the token emitted on rejection, (p - q)+, not normalised; p itself where nothing is positive.

    With q in counts of 2^-16 the difference is exact in float32: where it is positive, both are multiples of p's last
    place and the result has no more places than p.

    Args:
        p: [n, vocab] float32.
        rows: [m] row of each entry of q.
        ids: [m] its token; ids beyond the vocabulary are ignored, no (row, id) occurs twice.
        q: [m] its probability.
    """
    known = ids < p.shape[1]
    index = (_to(rows[known], torch.int64, p.device), _to(ids[known], torch.int64, p.device))
    before = p[index]
    after = (before - _to(q[known], p.dtype, p.device)).clamp_(min=0)
    out = p.index_put(index, after)
    if p.is_cuda:
        return _filled(out, p)
    removed = p.new_zeros(len(p)).index_add_(0, index[0], before - after)
    suspects = (removed > _NEARLY_ALL).nonzero().flatten()
    if len(suspects):
        out[suspects] = _filled(out[suspects], p[suspects])
    return out


def _filled(out: Tensor, p: Tensor) -> Tensor:
    """The rows of p where those of `out` have nothing positive."""
    return torch.where(out.amax(dim=1, keepdim=True) <= 0, p, out)


def coupled_choice(p: Tensor, row_keys: U64, ids: Tensor | None = None) -> Ints:
    """The token of each row under shared Gumbel noise, argmax p / e; the twin of `noise.coupled_choice`.

    Only ids that can win get a logarithm: e = -log1p(-v) >= v, so an id whose p / v does not reach the p / e of some
    other id has lost. The id with the largest p / v sets that bar; few are left above it.

    Args:
        p: [n, vocab] float32 weights.
        row_keys: uint64 [n] from `noise.gumbel_row_keys`.
        ids: int32 [vocab] token id of each column, rising, where that is not its number: its noise is the id's. On p's
            device.

    Returns:
        int64 [n] columns; ties go to the lowest id.
    """
    device = p.device
    low, high = (_to(half.view(np.int32), torch.int32, device)[:, None] for half in _halves(row_keys))
    token_ids = torch.arange(p.shape[1], dtype=torch.int32, device=device) if ids is None else ids
    chosen = np.empty(len(p), np.int64)
    for rows in _chunks(p):
        weights = p[rows]
        words = gumbel_words(low[rows], high[rows], token_ids).bitwise_and_(0x7FFFFFFF)
        bound = weights / words.to(torch.float32).add_(0.5)
        likely = argmax(bound).ids
        bar = _score(weights.gather(1, likely), words.gather(1, likely)) * (2.0**-31 * (1 - _ROUNDING))
        row, token = at_least(bound, bar)
        scores = _score(weights[row, token], words[row, token])
        found, tokens, reached = read(row, token, scores)
        chosen[rows] = _first_best(found, tokens, reached, len(weights))
    return chosen


def _score(weights: Tensor, words: Tensor) -> Tensor:
    """p / e in double precision; `words` are 31-bit."""
    v = (words.to(torch.float64) + 0.5) * 2.0**-31
    return weights.to(torch.float64) / -torch.log1p(-v)


def gumbel_words(low: Tensor, high: Tensor, token_ids: Tensor) -> Tensor:
    """`noise.gumbel_words` in wrapping int32 arithmetic: int32 [n, k] with the bits of those words.

    Args:
        low, high: int32 [n, 1], the halves of the row keys.
        token_ids: int32 [k].
    """
    h = token_ids ^ low
    h = h.bitwise_xor_(_shift(h, 16)).mul_(_FIRST_MULTIPLIER).bitwise_xor_(high)
    h = h.bitwise_xor_(_shift(h, 15)).mul_(_SECOND_MULTIPLIER)
    return h.bitwise_xor_(_shift(h, 16))


def draft_distribution(p: Tensor, draft_top_k: int, mass: float = 0.995, excluded: Tensor | None = None) -> DraftRows:
    """q as the draft may ship it: the fewest ids whose mass reaches `mass`, at most `draft_top_k`.

    Args:
        p: [n, vocab] processed rows of the draft.
        draft_top_k: ids per row at most.
        mass: probability to keep.
        excluded: bool [vocab], True for ids that q must not hold; a row with nothing else gets weights of 0 only.
    """
    if excluded is not None:
        p = p.masked_fill(excluded, 0.0)
    largest_values, largest_ids = largest(p, min(draft_top_k, p.shape[1]))
    values, ids = read(largest_values, largest_ids)
    probs = values.astype(np.float64)
    keep = truncate(probs, mass)
    probs[np.arange(probs.shape[1]) >= keep[:, None]] = 0.0
    return DraftRows(ids, probs)


def _first_best(rows: Ints, tokens: Ints, scores: F64, n: int) -> Ints:
    """The token of the best score of each of n rows, every row having an entry; the lowest of equals."""
    order = np.lexsort((tokens, -scores, rows))
    return tokens[order][np.searchsorted(rows[order], np.arange(n))]


def _chunks(weights: Tensor) -> Iterator[slice]:
    rows = max((_CUDA_CHUNK if weights.is_cuda else _CPU_CHUNK) // weights.shape[1], 1)
    for start in range(0, len(weights), rows):
        yield slice(start, min(start + rows, len(weights)))


def _halves(keys: U64) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    return keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)


def _shift(words: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32 (torch's is arithmetic)."""
    return (words >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _to(values: NDArray[np.generic], dtype: torch.dtype, device: torch.device) -> Tensor:
    return to_device(values, device).to(dtype)
