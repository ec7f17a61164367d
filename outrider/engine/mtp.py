"""The MTP head: a multi-token-prediction layer of the target's own checkpoint (DeepSeek-V3, arXiv 2412.19437).

It projects the target's last hidden state (behind its final norm) together with a token's embedding, runs one decoder
layer of the target's own architecture over it, and is read by the target's own output head. Layer and norms are
transformers'; only the attention is the caller's, reached through the engine's attention function. For positions
that the target has not passed the head is fed its own normed output, as the layers of a longer chain would be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.head import Attend, HeadShape
from outrider.errors import ModelRefused


class MtpHead(nn.Module):
    """One MTP layer and the output head that it shares; see `outrider.engine.head` for its rows."""

    def __init__(self, layer: Any, rotary: nn.Module, output: Tensor) -> None:
        """
        Args:
            layer: transformers' `MtpLayer`, its attention set to the engine's implementation.
            rotary: rotary embedding of the architecture.
            output: [vocab, hidden] the target's output head.

        Raises:
            ModelRefused: the layer's attention asks for what the ring does not compute.
        """
        super().__init__()
        vocab, hidden = output.shape
        self.layer = layer
        self.rotary = rotary
        self.lm_head = nn.Linear(hidden, vocab, bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(output, requires_grad=False)
        self.register_buffer("target_ids", torch.arange(vocab), persistent=False)
        self.target_ids: Tensor
        self._attention = _Attention()
        layer.mtp_block.self_attn.outrider_layer = self._attention
        self.shape, self.sliding_window = self._observe(hidden)

    def fuse(self, features: Tensor) -> Tensor:
        """[rows, hidden]: the features are the hidden states."""
        return features

    @torch.inference_mode()
    def forward(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step over any rows: [rows, hidden], normed."""
        self._attention.attend = attend
        rotated = self.rotary(embeddings[None], positions[None])
        stepped: Tensor = self.layer(
            embeddings[None],
            hidden[None],
            position_embeddings=rotated,
            attention_mask=None,
            position_ids=positions[None],
            cache=None,
        )
        return stepped[0]

    @torch.inference_mode()
    def key_value(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [rows, kv_heads, width] alone: the layer up to its attention."""
        kept: list[tuple[Tensor, Tensor]] = []

        def keep(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            kept.append((key, value))
            return query.new_zeros((*query.shape[:2], value.shape[2]))

        self._attention.attend = keep
        layer, block = self.layer, self.layer.mtp_block
        parts = [layer.enorm(embeddings), layer.hnorm(hidden)]
        mixed = layer.eh_proj(torch.cat(parts, dim=-1))[None]
        block.self_attn(
            hidden_states=block.input_layernorm(mixed),
            position_embeddings=self.rotary(mixed, positions[None]),
            attention_mask=None,
            position_ids=positions[None],
        )
        return kept[0]

    def carry(self, output: Tensor) -> Tensor:
        """[rows, hidden]: the output itself."""
        return output

    def logits(self, output: Tensor) -> Tensor:
        """[rows, vocab]."""
        scored: Tensor = self.lm_head(output)
        return scored

    def _observe(self, hidden: int) -> tuple[HeadShape, int | None]:
        """What the layer passes to its attention."""
        weight = self.layer.eh_proj.weight
        row = torch.zeros((1, hidden), dtype=weight.dtype, device=weight.device)
        key, value = self.key_value(row, row, torch.zeros(1, dtype=torch.int64, device=weight.device))
        return HeadShape(hidden, key.shape[1], key.shape[2], value.shape[2]), self._attention.window


class _Attention:
    """The engine's attention of this layer: a `LayerCall` that hands over to the step's own.

    Attributes:
        attend: of the step.
        window: sliding window that the layer asked for last.
    """

    def __init__(self) -> None:
        self.attend: Attend | None = None
        self.window: int | None = None

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
        """[1, heads, rows, width] in, [1, rows, heads, value_width] out."""
        if softcap is not None or sinks is not None:
            raise ModelRefused("an MTP layer with capped scores or attention sinks is not supported")
        assert self.attend is not None, "attention is called within a step"
        self.window = window
        width = query.shape[3]
        scaled = query if scaling is None else query * (scaling * width**0.5)
        rows = (states[0].transpose(0, 1) for states in (scaled, key, value))
        return self.attend(*rows)[None]
