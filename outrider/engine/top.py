"""The largest values of long rows, found by way of blocks of ids.

A vectorised maximum is some fifteen times faster than an argmax and fifty times faster than a partial sort, so each row
is reduced to its blocks' maxima first, and only the blocks that matter are looked into.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 32


class Found(NamedTuple):
    """Values and the ids that have them, both [rows, k]."""

    values: Tensor
    ids: Tensor


def largest(rows: Tensor, k: int) -> Found:
    """`rows.topk(k)`: falling values; equal ones in any order.

    Args:
        rows: [n, width], no value -inf among the k largest.
        k: at most the width.
    """
    if rows.shape[1] < 2 * k * _BLOCK:
        return Found(*rows.topk(k, dim=1))
    members = _look_into(rows, _block_maxima(rows).topk(k, dim=1).indices)
    best = members.values.topk(k, dim=1)
    return Found(best.values, members.ids.gather(1, best.indices))


def argmax(rows: Tensor) -> Found:
    """The largest value of each row and the lowest id that has it, [n, 1] each; NaN counts as the largest.

    Args:
        rows: [n, width].
    """
    # argmax returns the first of equals on every device.
    members = _look_into(rows, _block_maxima(rows).argmax(dim=1, keepdim=True))
    best = members.values.argmax(dim=1, keepdim=True)
    return Found(members.values.gather(1, best), members.ids.gather(1, best))


def at_least(rows: Tensor, bar: Tensor) -> tuple[Tensor, Tensor]:
    """Row and id of every value that reaches its row's bar, in row and id order.

    Args:
        rows: [n, width].
        bar: [n, 1].
    """
    row, block = (_block_maxima(rows) >= bar).nonzero(as_tuple=True)
    ids = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=rows.device)
    last = rows.shape[1] - 1
    is_hit = (ids <= last) & (rows[row[:, None], ids.clamp(max=last)] >= bar[row])
    hit, place = is_hit.nonzero(as_tuple=True)
    return row[hit], ids[hit, place]


def _block_maxima(rows: Tensor) -> Tensor:
    """[n, blocks]; the last block is shorter where the width is no multiple of the block."""
    full = rows.shape[1] // _BLOCK
    maxima = rows[:, : full * _BLOCK].unflatten(1, (full, _BLOCK)).amax(dim=2)
    if full * _BLOCK == rows.shape[1]:
        return maxima
    return torch.cat((maxima, rows[:, full * _BLOCK :].amax(dim=1, keepdim=True)), dim=1)


def _look_into(rows: Tensor, blocks: Tensor) -> Found:
    """All values and ids of some blocks of each row, [n, k x block], -inf behind the end of the row."""
    ids = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=rows.device)).flatten(1)
    last = rows.shape[1] - 1
    values = rows.gather(1, ids.clamp(max=last))
    return Found(values.masked_fill(ids > last, -math.inf), ids)
