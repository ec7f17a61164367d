"""Attention by torch's paged variable-length FlashAttention: CUDA, half precision, no gathering."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from outrider.engine.attention import Step
from outrider.engine.batch import RaggedBatch
from outrider.engine.config import VARLEN_PAGE
from outrider.engine.kv_cache import LayerKV, LayerShape
from outrider.engine.layout import slot_index
from outrider.engine.transfer import to_device

LENGTHS = "varlen"
"""Name of the lengths among a batch's layouts."""

MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)


class Lengths(NamedTuple):
    """A step's arguments to `varlen_attn`; padding rows form one more sequence, which looks at the scratch block.

    Attributes:
        cu_queries: [sequences + 1] int32 first row of each sequence.
        cu_keys: [sequences + 1] int32, the running sum of `keys`.
        keys: [sequences] int32 keys each sequence may see.
        block_table: [sequences, pages] int32.
        max_queries, max_keys: The longest.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    keys: Tensor
    block_table: Tensor
    max_queries: int
    max_keys: int


def varlen_obstacle(shape: LayerShape) -> str | None:
    """Why a layer cannot take this path, or None if it can."""
    if shape.device.type != "cuda":
        return f"device {shape.device.type}"
    capability = torch.cuda.get_device_capability(shape.device)
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {shape.dtype}"
    if shape.width > MAX_HEAD_DIM or shape.head_dim % 8:
        return f"head size {shape.width}"
    if shape.head_dim != shape.value_dim:
        return "keys and values of different width"
    if shape.softcap is not None:
        return "softcap"
    if shape.sinks:
        return "attention sinks"
    return None


class VarlenLayer:
    """One layer's attention through `varlen_attn`."""

    def __init__(self, step: Step, kv: LayerKV, shape: LayerShape) -> None:
        if kv.keys.shape[1] % VARLEN_PAGE:
            raise ValueError(f"pages of {kv.keys.shape[1]} tokens; the kernel reads multiples of {VARLEN_PAGE}")
        self._step = step
        self._kv = kv
        self._grouped = shape.query_heads != shape.kv_heads
        self._key_slots = kv.keys.flatten(0, 1)
        self._value_slots = kv.values.flatten(0, 1)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        if softcap is not None or sinks is not None:
            raise RuntimeError("this kernel computes neither a softcap nor attention sinks")
        batch = self._step.current
        slots = slot_index(batch, query.device)
        self._key_slots.index_copy_(0, slots, key[0].transpose(0, 1))
        self._value_slots.index_copy_(0, slots, value[0].transpose(0, 1))
        lengths = _lengths(batch, query.device)
        out = varlen_attn(
            query[0].transpose(0, 1).contiguous(),
            self._kv.keys,
            self._kv.values,
            lengths.cu_queries,
            lengths.cu_keys,
            lengths.max_queries,
            lengths.max_keys,
            scale=scaling,
            # The kernel's left bound counts the keys before the row itself.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=self._grouped,
            seqused_k=lengths.keys,
            block_table=lengths.block_table,
            # Splitting the keys over thread blocks depends on the longest stream of the batch: other mates, other bits.
            num_splits=1,
        )
        assert isinstance(out, Tensor)
        return out.unsqueeze(0)


def _lengths(batch: RaggedBatch, device: torch.device) -> Lengths:
    key = (LENGTHS, device)
    if key not in batch.layouts:
        batch.layouts[key] = _build_lengths(batch, device)
    return batch.layouts[key]


def _build_lengths(batch: RaggedBatch, device: torch.device) -> Lengths:
    queries = [len(span.tokens) for span in batch.spans]
    keys = [span.start - span.dropped + len(span.tokens) for span in batch.spans]
    padding = batch.rows - batch.tokens
    if padding:
        queries.append(padding)
        keys.append(padding)
    pages = [-(-count // batch.block_size) for count in keys]
    table = np.full((len(keys), max(pages)), batch.scratch_block, dtype=np.int32)
    for row, span in enumerate(batch.spans):
        table[row, : pages[row]] = span.blocks[: pages[row]]

    def on_device(values: np.ndarray) -> Tensor:
        return to_device(values.astype(np.int32), device)

    return Lengths(
        on_device(np.cumsum([0, *queries])),
        on_device(np.cumsum([0, *keys])),
        on_device(np.array(keys)),
        on_device(table),
        max(queries),
        max(keys),
    )
