"""The KV tensors: one pool per kind of layer, cut into blocks, with one scratch block beyond those handed out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.block_manager import Copy


class LayerShape(NamedTuple):
    """What one attention layer was seen to pass to the attention function."""

    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    softcap: float | None
    dtype: torch.dtype
    device: torch.device
    sinks: bool = False

    @property
    def width(self) -> int:
        """Stored width of a key or value; both get the larger one, so that kernels see equal widths."""
        return max(self.head_dim, self.value_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V for one position in this layer."""
        return 2 * self.kv_heads * self.width * self.dtype.itemsize


class LayerKV(NamedTuple):
    """One layer's keys and values, each [blocks + 1, block_size, kv_heads, width]."""

    keys: Tensor
    values: Tensor


class KVCache:
    """Paged keys and values of all layers; block `num_blocks` is scratch for padding rows."""

    def __init__(self, shapes: Mapping[int, LayerShape], num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.scratch_block = num_blocks
        self.layers: dict[int, LayerKV] = {}
        self._pools: list[Tensor] = []
        kinds: dict[tuple[int, int, torch.dtype, torch.device], list[int]] = {}
        for layer, shape in shapes.items():
            kinds.setdefault((shape.kv_heads, shape.width, shape.dtype, shape.device), []).append(layer)
        for (heads, width, dtype, device), layers in kinds.items():
            size = (len(layers), 2, num_blocks + 1, block_size, heads, width)
            pool = torch.zeros(size, dtype=dtype, device=device)
            self._pools.append(pool)
            for index, layer in enumerate(layers):
                self.layers[layer] = LayerKV(pool[index, 0], pool[index, 1])

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks that get a new owner.

        Masked keys still enter the sums as 0 * value, so a NaN that an overflowing stream left behind would otherwise
        reach the block's next owner.
        """
        for pool in self._pools:
            for block in blocks:
                # Six times faster than one index_fill_, which walks the pool element by element.
                pool[:, :, block].zero_()

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies the first positions of blocks into blocks that get a new owner, one after the other."""
        for pool in self._pools:
            for source, target, tokens in copies:
                pool[:, :, target].zero_()
                pool[:, :, target, :tokens] = pool[:, :, source, :tokens]
