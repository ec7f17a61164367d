"""min_p, top_k and top_p on rows of probabilities, without sorting a vocabulary.

Every choice between equal values falls on the lowest ids. top_p keeps the fewest ids whose share of the mass that min_p
and top_k left reaches it.

Two ways to the same cut. Where all that is kept lies among a row's 64 largest values, and the cut does not fall between
two equal ones, those 64 are enough. The other rows are cut at a level found by radix selection: a histogram over the
upper half of the floats' bits, then one over the lower half (bits of non-negative floats are ordered like the floats).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.top import largest

# How many of the largest values are looked at first.
_TOP = 64

# A set that misses top_p by less is taken to reach it: probabilities carry float32 rounding, and .9 in it is below 0.9.
_SLACK = 1e-6
# At least one id is kept, however small top_p is.
_LEAST = 1e-300

# Rows that go through radix selection at once, by device; its histograms take half a megabyte each.
_RADIX_ROWS = {"cpu": 2, "cuda": 64}
_HALF_BITS = 16
_LOW_HALF = (1 << _HALF_BITS) - 1
# The upper half of 1.0, the largest probability, rounded up generously.
_UPPER_BUCKETS = 0x4000


class Filters(NamedTuple):
    """The filters of a request; the defaults keep everything. A top_k of 0 keeps all ids."""

    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def cut(p: Tensor, filters: Filters) -> Tensor:
    """Zeroes what the filters drop and renormalises.

    Args:
        p: [rows, vocab] float32, each row summing to 1. A row that holds NaN comes back as any row.
        filters: what to drop.
    """
    values, ids = largest(p, min(_TOP, p.shape[1]))
    cuts = _cut_sorted(values, filters, whole=values.shape[1] == p.shape[1])
    out = torch.zeros_like(p).scatter_(1, ids, cuts.weights)
    rest = (~cuts.is_final).nonzero().flatten()
    for rows in rest.split(_RADIX_ROWS[p.device.type]):
        out[rows] = _cut_unsorted(p[rows], filters)
    return out


class _Cuts(NamedTuple):
    """Weights [rows, k] of sorted values after the cut, and bool [rows], whether that is the last word."""

    weights: Tensor
    is_final: Tensor


def _cut_sorted(values: Tensor, filters: Filters, *, whole: bool) -> _Cuts:
    """Cuts rows of falling values, `whole` where they are all that the rows have."""
    ranks = torch.arange(values.shape[1], device=values.device)
    alive = (values > 0) & (values >= filters.min_p * values[:, :1])
    if filters.top_k:
        alive &= ranks < filters.top_k
    mass = torch.where(alive, values, 0).cumsum(dim=1, dtype=torch.float64)
    count = alive.sum(dim=1, keepdim=True)
    is_final = torch.ones_like(alive[:, :1]) if whole else ~alive[:, -1:]
    if filters.top_p < 1:
        unfiltered = filters.min_p == 0 and filters.top_k == 0
        target = filters.top_p * (1.0 if unfiltered else mass[:, -1:]) - _SLACK
        if unfiltered:
            is_final = is_final | (mass[:, -1:] >= target)
        count = torch.minimum((mass < target).sum(dim=1, keepdim=True) + 1, count)
    last = (count - 1).clamp(min=0)
    # Equal values come in any order; a cut between two of them, or behind the last one seen, is left to the other way.
    behind = torch.cat((values, torch.full_like(values[:, :1], -1.0) if whole else values[:, -1:]), dim=1)
    is_final = is_final & (behind.gather(1, count) != values.gather(1, last))
    weights = torch.where(is_final & (ranks < count), values / mass.gather(1, last), 0).to(values.dtype)
    # A row without any value alive holds NaN.
    return _Cuts(weights, (is_final | (count == 0)).squeeze(1))


def _cut_unsorted(p: Tensor, filters: Filters) -> Tensor:
    if filters.min_p:
        p = torch.where(p >= filters.min_p * p.amax(dim=1, keepdim=True), p, 0)
    if filters.top_k:
        wanted = torch.full_like(p[:, :1], filters.top_k, dtype=torch.float64)
        level, above = _select(p, torch.ones_like(p, dtype=torch.float64), wanted)
        p = _keep(p, level, wanted - above)
    if filters.top_p < 1:
        target = (filters.top_p * _mass(p) - _SLACK).clamp(min=_LEAST)
        level, above = _select(p, p.to(torch.float64), target)
        p = _keep(p, level, ((target - above) / level).ceil())
    return (p / _mass(p)).to(torch.float32)


def _select(p: Tensor, weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The largest level at which the weights of values >= level reach the target, and the weight above that level.

    Args:
        p: [rows, vocab] float32, not negative.
        weights: float64 [rows, vocab].
        target: float64 [rows, 1], at most the row's whole weight (else the level is 0).
    """
    bits = p.view(torch.int32)
    upper, lower = bits >> _HALF_BITS, bits & _LOW_HALF
    bucket, above = _last_bucket(upper, weights, target, _UPPER_BUCKETS)
    within = torch.where(upper == bucket, weights, 0)
    low_bucket, low_above = _last_bucket(lower, within, target - above, 1 << _HALF_BITS)
    level = (bucket << _HALF_BITS | low_bucket).to(torch.int32).view(torch.float32)
    return level, above + low_above


def _last_bucket(buckets: Tensor, weights: Tensor, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Counted from the top: the bucket in which the running weight reaches the target, and the weight above it."""
    histogram = weights.new_zeros((len(weights), count)).scatter_add_(1, buckets.long(), weights)
    running = histogram.flip(1).cumsum(dim=1)
    place = (running < target).sum(dim=1, keepdim=True).clamp(max=count - 1)
    above = running.gather(1, place) - histogram.gather(1, count - 1 - place)
    return count - 1 - place, above


def _keep(p: Tensor, level: Tensor, extra: Tensor) -> Tensor:
    """What lies above the level, and the first `extra` ids at it."""
    equal = p == level
    return torch.where((p > level) | (equal & (equal.cumsum(dim=1) <= extra)), p, 0)


def _mass(p: Tensor) -> Tensor:
    """Sum of each row, float64 [rows, 1]; a running one, because torch's sum of a single row splits it over threads."""
    return p.cumsum(dim=1, dtype=torch.float64)[:, -1:]
