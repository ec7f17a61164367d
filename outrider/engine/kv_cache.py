"""The KV tensors: one pool per kind of layer, cut into blocks, with one scratch block beyond those handed out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil
import torch
from torch import Tensor

from outrider.engine.config import EngineConfig
from outrider.errors import DoesNotFit

log = logging.getLogger(__name__)

# On the CPU the pool is bounded by these two unless `kv_cache_tokens` says otherwise.
CPU_KV_TOKENS = 65_536
CPU_MEMORY_SHARE = 0.4


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


def plan_blocks(
    config: EngineConfig, *, block_size: int, bytes_per_token: int, longest: int, workspace_bytes: int
) -> int:
    """How many KV blocks fit beside the weights, which are loaded already.

    Args:
        config: The engine's configuration.
        block_size: Tokens per block.
        bytes_per_token: K and V of one position over all layers.
        longest: Tokens of the longest stream that must fit.
        workspace_bytes: What a full step needs besides weights and KV.

    Raises:
        DoesNotFit: the longest stream would not fit; the message holds the numbers.
    """
    if config.kv_cache_tokens is not None:
        tokens = config.kv_cache_tokens
        source = "kv_cache_tokens"
    else:
        budget = _budget_bytes(config) - workspace_bytes
        tokens = max(0, budget) // bytes_per_token
        source = f"{budget / 2**20:,.0f} MiB left of the memory plan"
        if not config.on_cuda:
            tokens = min(tokens, CPU_KV_TOKENS)
    blocks = tokens // block_size
    needed = longest if config.max_model_len is not None else block_size
    if blocks * block_size < needed:
        raise DoesNotFit(
            f"KV for {needed} tokens at {bytes_per_token:,} bytes each is needed, {blocks * block_size} tokens fit "
            f"({source}): lower max_model_len, or raise kv_cache_tokens or gpu_memory_utilization"
        )
    log.info(
        "KV pool: %d blocks of %d tokens, %.0f MiB", blocks, block_size, blocks * block_size * bytes_per_token / 2**20
    )
    return blocks


def _budget_bytes(config: EngineConfig) -> int:
    if not config.on_cuda:
        return int(psutil.virtual_memory().available * CPU_MEMORY_SHARE)
    if config.device == "auto":
        devices = range(torch.cuda.device_count())
    else:
        index = torch.device(config.device).index
        devices = range(index, index + 1) if index is not None else range(1)
    budget = 0
    for device in devices:
        free, total = torch.cuda.mem_get_info(device)
        budget += int(free - total * (1 - config.gpu_memory_utilization))
    return budget
