"""How a step's rows are arranged into attention calls on the gather path, derived once per step for all layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batch import SHARED_SEGMENT, RaggedBatch, RowGroup, round_up
from outrider.engine.transfer import to_device

SLOTS = "slots"
"""Name of the KV slots among a batch's layouts."""

# Matrix kernels handle the last rows % 4 rows by other code: 1-3 left-over rows give other bits (bf16, fp32 and fp64).
PACKED_MULTIPLE = 4


class Call(NamedTuple):
    """One attention call of a step, for layers with the same heads.

    Attributes:
        queries: [streams * packed * heads] row of each query vector in the flat [rows * query_heads, width] view.
        streams, packed, heads: Shape of the call; `heads` is the KV heads when query heads are folded into rows.
        keys: KV length.
        blocks: [streams * keys / block_size] blocks to gather.
        positions: [streams, packed] position of each packed row.
    """

    queries: Tensor
    streams: int
    packed: int
    heads: int
    keys: int
    blocks: Tensor
    positions: Tensor

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[streams, 1, packed, keys]: 0 where a row may look, -inf elsewhere."""
        key = torch.arange(self.keys, device=self.positions.device)
        position = self.positions[:, None, :, None]
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


class Layout(NamedTuple):
    """The calls of a step and where each output vector is found in their concatenated results."""

    calls: list[Call]
    outputs: Tensor


def slot_index(batch: RaggedBatch, device: torch.device) -> Tensor:
    """The batch's KV slots on `device`."""
    key = (SLOTS, device)
    if key not in batch.layouts:
        batch.layouts[key] = to_device(batch.slots, device)
    return batch.layouts[key]


def layout_of(batch: RaggedBatch, heads: int, kv_heads: int, device: torch.device) -> Layout:
    """The step's calls for layers of these heads, built for the first of them."""
    key = ("gather", heads, kv_heads, device)
    if key not in batch.layouts:
        batch.layouts[key] = _build_layout(batch, heads, kv_heads, device)
    return batch.layouts[key]


def biases_of(
    batch: RaggedBatch, layout: Layout, heads: int, kv_heads: int, window: int | None, dtype: torch.dtype
) -> list[Tensor]:
    """Each call\'s mask for layers of this window, built for the first of them."""
    key = ("bias", heads, kv_heads, layout.outputs.device, window, dtype)
    if key not in batch.layouts:
        batch.layouts[key] = [call.bias(window, dtype) for call in layout.calls]
    return batch.layouts[key]


def _build_layout(batch: RaggedBatch, heads: int, kv_heads: int, device: torch.device) -> Layout:
    calls = []
    # Padding rows have no call of their own; they repeat the result at 0.
    outputs = np.zeros((batch.rows, heads), dtype=np.int64)
    offset = 0
    for group in batch.groups():
        call, packed_head = _build_call(group, heads, kv_heads, device)
        calls.append(call)
        streams, rows = group.rows.shape
        # Vector (row i, query head) of a stream is packed row i * fold + g of head h, with query head = h * fold + g.
        fold = heads // call.heads
        place = np.arange(rows)[:, None] * fold + packed_head[None, :, 1]
        place = (np.arange(streams)[:, None, None] * call.packed + place[None]) * call.heads + packed_head[
            None, None, :, 0
        ]
        outputs[group.rows] = offset + place
        offset += streams * call.packed * call.heads
    return Layout(calls, to_device(outputs.reshape(-1), device))


def _build_call(group: RowGroup, heads: int, kv_heads: int, device: torch.device) -> tuple[Call, np.ndarray]:
    streams, rows = group.rows.shape
    # The query heads that share a KV head become rows of one product; pointless for long segments, whose mask it
    # would repeat.
    fold = heads // kv_heads if rows <= SHARED_SEGMENT else 1
    call_heads = heads // fold
    packed = round_up(rows * fold, PACKED_MULTIPLE)
    place = np.minimum(np.arange(packed), rows * fold - 1)
    row, inner = place // fold, place % fold
    queries = (
        group.rows[:, row][:, :, None] * heads + np.arange(call_heads)[None, None, :] * fold + inner[None, :, None]
    )
    query_head = np.arange(heads)
    call = Call(
        to_device(queries.reshape(-1), device),
        streams,
        packed,
        call_heads,
        group.keys,
        to_device(group.blocks, device),
        to_device(group.positions[:, row], device),
    )
    return call, np.stack([query_head // fold, query_head % fold], 1)
