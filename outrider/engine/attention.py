"""Attention over paged KV for a ragged batch, registered with transformers under one name.

Two paths. *Gather*: keys and values are gathered by block table and grouped into few `scaled_dot_product_attention`
calls; runs everywhere. *Varlen*: torch's own paged variable-length FlashAttention; CUDA, half precision.

Both give a row the same bits whatever rides beside it. On the gather path that rests on three rules: the key length
of a call depends on the row's own position only (`RaggedBatch.groups`), the rows of a call are padded to a multiple
of `layout.PACKED_MULTIPLE`, and masked keys are finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from outrider.engine.batch import RaggedBatch
from outrider.engine.kv_cache import LayerKV, LayerShape
from outrider.engine.layout import Call, biases_of, layout_of, slot_index
from outrider.errors import ModelRefused

IMPLEMENTATION = "outrider_paged"

LayerCall = Callable[[Tensor, Tensor, Tensor, float | None, int | None, float | None, Tensor | None], Tensor]


@dataclass(slots=True)
class Step:
    """What the layers of one model share: the batch that is being computed."""

    batch: RaggedBatch | None = None

    @property
    def current(self) -> RaggedBatch:
        """The batch being computed."""
        if self.batch is None:
            raise RuntimeError("attention was called outside a step")
        return self.batch


def register() -> None:
    """Makes the attention function known to transformers; harmless when repeated."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' `AttentionInterface`.

    Args:
        module: The attention module; carries its `LayerCall` as `outrider_layer`.
        query: [1, query_heads, rows, head_dim]; `key` and `value` likewise with KV heads, new tokens only.
        attention_mask: Ignored: the step's batch says who may look where.
        scaling: Factor on the scores; unset means head_dim ** -0.5.
        dropout: Ignored: inference only.
        sliding_window: A row sees itself and the window - 1 keys before it.
        softcap: Scores become softcap * tanh(score / softcap).
        s_aux: [query_heads] attention sinks: one more logit per head in the softmax, with no value behind it.
        position_bias: Learned bias, not supported.

    Returns:
        [1, rows, query_heads, value_dim] and no weights.

    Raises:
        ModelRefused: the model asks for something this function does not compute.
    """
    if position_bias is not None:
        raise ModelRefused(f"{type(module).__name__} uses a position bias, which the paged attention does not compute")
    if torch.compiler.is_compiling():
        number = module.outrider_number
        return torch.ops.outrider.attend(query, key, value, number, scaling, sliding_window, softcap, s_aux), None
    layer: LayerCall = module.outrider_layer  # type: ignore[assignment]
    return layer(query, key, value, scaling, sliding_window, softcap, s_aux), None


class GatherLayer:
    """One layer's attention by gathering; see the module's docstring."""

    def __init__(self, step: Step, kv: LayerKV, shape: LayerShape) -> None:
        self._step = step
        self._shape = shape
        blocks = kv.keys.shape[0]
        self._key_blocks = kv.keys.view(blocks, -1)
        self._value_blocks = kv.values.view(blocks, -1)
        self._key_slots = kv.keys.flatten(0, 1)[..., : shape.head_dim]
        self._value_slots = kv.values.flatten(0, 1)[..., : shape.value_dim]

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
        batch = self._step.current
        heads, rows, head_dim = query.shape[1:]
        kv_heads, width = self._shape.kv_heads, self._shape.width
        slots = slot_index(batch, query.device)
        self._key_slots.index_copy_(0, slots, key[0].transpose(0, 1))
        self._value_slots.index_copy_(0, slots, value[0].transpose(0, 1))
        layout = layout_of(batch, heads, kv_heads, query.device)
        biases = biases_of(batch, layout, heads, kv_heads, window, query.dtype)
        flat = query[0].transpose(0, 1).reshape(rows * heads, head_dim)
        if scaling is None:
            scaling = head_dim**-0.5
        results = []
        for call, bias in zip(layout.calls, biases, strict=True):
            q = flat.index_select(0, call.queries).view(call.streams, call.packed, call.heads, head_dim).transpose(1, 2)
            stored = (call.streams, call.keys, kv_heads, width)
            k = self._key_blocks.index_select(0, call.blocks).view(stored).transpose(1, 2)
            v = self._value_blocks.index_select(0, call.blocks).view(stored).transpose(1, 2)
            sink = None
            if sinks is not None:
                # The query head of each packed row is what is left of its place in the flat view.
                by_row = sinks.index_select(0, call.queries % heads).view(call.streams, call.packed, call.heads, 1)
                sink = by_row.transpose(1, 2)
            out = attend(q, k if head_dim == width else k[..., :head_dim], v, bias, scaling, softcap, sink)
            results.append(out.transpose(1, 2).reshape(-1, width))
        result = results[0] if len(results) == 1 else torch.cat(results)
        return result.index_select(0, layout.outputs).view(1, rows, heads, width)[..., : self._shape.value_dim]


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaling: float, softcap: float | None, sink: Tensor | None
) -> Tensor:
    """softmax(cap(q k^T * scaling) + bias) v, with fewer KV heads than query heads allowed.

    With a sink s, each weight is exp(score) / (exp(s) + sum of exp(scores)) (gpt-oss model card, arXiv 2508.10925).

    Args:
        q: [streams, heads, rows, width].
        k, v: [streams, kv_heads, keys, width].
        bias: [streams, 1, rows, keys].
        scaling: Factor on the scores.
        softcap: Gemma-2's cap on the scores (Gemma 2 report, section 2), or None.
        sink: [streams, heads, rows, 1] of each row's head, or None.
    """
    grouped = q.shape[1] != k.shape[1]
    if softcap is None and sink is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling, enable_gqa=grouped)
    if grouped:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.matmul(q, k.transpose(2, 3))
    scores = scores * scaling if softcap is None else torch.tanh(scores * (scaling / softcap)) * softcap
    scores = scores + bias
    total = accumulator(q.dtype)
    if sink is None:
        return torch.matmul(torch.softmax(scores, -1, dtype=total).to(q.dtype), v)
    weights = torch.softmax(torch.cat([scores.to(total), sink.to(total)], -1), -1)[..., :-1]
    return torch.matmul(weights.to(q.dtype), v)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over values of `dtype` are formed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class DenseLayer:
    """Plain causal attention over a single stream of new tokens; notes what the layer passes, for the KV plan."""

    def __init__(self, shapes: dict[int, LayerShape], layer: int) -> None:
        self._shapes = shapes
        self._layer = layer

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
        heads, rows, head_dim = query.shape[1:]
        self._shapes[self._layer] = LayerShape(
            heads, key.shape[1], head_dim, value.shape[3], window, softcap, key.dtype, key.device, sinks is not None
        )
        position = torch.arange(rows, device=query.device)
        call = Call(position, 1, rows, heads, rows, position, position[None])
        sink = None if sinks is None else sinks.view(1, heads, 1, 1).expand(1, heads, rows, 1)
        out = attend(query, key, value, call.bias(window, query.dtype), scaling or head_dim**-0.5, softcap, sink)
        return out.transpose(1, 2)
