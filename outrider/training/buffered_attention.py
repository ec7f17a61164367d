"""Attention of a target that decodes whole batches: keys in buffers that grow, and no key repeated."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "outrider_teacher"

_GROWTH_TOKENS = 64


def register() -> None:
    """Makes the attention known to transformers under `IMPLEMENTATION`."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


class GrowingLayer(DynamicLayer):
    """Keys and values in a buffer that grows by blocks: appending a token copies that token only.

    When decoding, the attention is given the whole buffer, for matrix products over whole ones are several times
    faster than over slices; what lies behind the mask is zero.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        held = self.get_seq_length()
        new = key_states.shape[2]
        if not self._buffers or held + new > self._buffers[0].shape[2]:
            capacity = -(-(held + new) // _GROWTH_TOKENS) * _GROWTH_TOKENS
            self._buffers = [
                states.new_zeros(*states.shape[:2], capacity, states.shape[3]) for states in (key_states, value_states)
            ]
            if held:
                self._buffers[0][:, :, :held].copy_(self.keys)  # type: ignore[arg-type]
                self._buffers[1][:, :, :held].copy_(self.values)  # type: ignore[arg-type]
            self.is_initialized = True
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, held : held + new] = states
        self.keys, self.values = (buffer[:, :, : held + new] for buffer in self._buffers)
        return (self._buffers[0], self._buffers[1]) if new == 1 else (self.keys, self.values)

    def batch_select_indices(self, indices: Tensor) -> None:
        held = self.get_seq_length()
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self.keys, self.values = (buffer[:, :, :held] for buffer in self._buffers)


def _mask(*arguments: Any, **named: Any) -> Tensor | None:
    """transformers' own mask, always spelled out: the buffers are longer than what they hold."""
    return sdpa_mask(*arguments, **{**named, "allow_is_causal_skip": False})


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention that never repeats keys when decoding: the query heads of a KV head stand in as its query rows."""
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    if rows > 1:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=heads != kv_heads
        )
        return out.transpose(1, 2), None
    visible = F.pad(attention_mask, (0, key.shape[2] - attention_mask.shape[3]))
    folded = query.view(batch, kv_heads, heads // kv_heads, width)
    scores = (folded @ key.transpose(2, 3)).float() * scaling
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).to(value.dtype)
    return (weights @ value).reshape(batch, 1, heads, -1), None
