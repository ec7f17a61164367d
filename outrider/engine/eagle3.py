"""The EAGLE-3 head: one decoder layer that continues the target's own features (Li et al. 2503.01840).

A row of the head stands for position t. It is fed the embedding of token t + 1 and a hidden state for position t, and
its logits are q for token t + 2. Where the target has passed position t, the hidden state is `fuse(features)`: three of
the target's layers, projected. Further on it is `carry` of the head's own output for the row before (the identity in
the published layout), which is why that output (and not its norm) is what `forward` returns.

The head computes, it does not remember: attention is the caller's, given as a function, so that training can unroll
it over a whole batch and serving can keep keys and values as it likes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.engine.head import Attend, HeadShape


class Llama3Rope(NamedTuple):
    """Llama 3's stretch of the rotary embedding (its `rope_scaling`; `positions` is the original context length)."""

    factor: float
    low: float
    high: float
    positions: int


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Shape of a head.

    Attributes:
        hidden: Width of the head.
        intermediate: Width of its MLP.
        heads, kv_heads, head_dim: Of its attention.
        target_hidden: Width of the target's hidden states.
        feature_layers: Decoder layers of the target whose input is a feature (an index = layers that ran before it).
        vocab: Ids of the target.
        draft_vocab: Ids that the head can propose; at most `vocab`.
        norm_eps: Of every RMS norm.
        rope_theta: Base of the rotary embedding.
        rope_scaling: Llama 3's stretch; unset leaves the rotary embedding as it is.
        window: Positions a row may look back, itself included; unset means all.
        norm_before_residual: Whether the residual starts from the normed hidden state.
        direct: Whether the head has two matrices more than the published layout: `embed_proj`, which adds the token's
            embedding to the residual, and `carry`, which turns an output into the next step's hidden state. Without
            them a token enters through the values of the attention alone, kv_heads * head_dim wide, and a small head
            learns slowly what follows which token.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    target_hidden: int
    feature_layers: tuple[int, ...]
    vocab: int
    draft_vocab: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Llama3Rope | None = None
    window: int | None = None
    norm_before_residual: bool = False
    direct: bool = False

    @property
    def parameters(self) -> int:
        """Number of weights, the shared embedding not counted."""
        attention = self.head_dim * (2 * self.hidden * (self.heads + 2 * self.kv_heads) + self.heads * self.hidden)
        fused = len(self.feature_layers) * self.target_hidden * self.hidden
        direct = 2 * self.hidden**2 if self.direct else 0
        layer = attention + 3 * self.hidden * self.intermediate + direct
        return fused + layer + self.draft_vocab * self.hidden + 4 * self.hidden


class Eagle3Head(nn.Module):
    """The head's weights and its one step. The embedding of the target is passed in, not owned."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.feature_layers) * config.target_hidden, config.hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = _Norm(config.hidden, eps=config.norm_eps)
        self.carry = nn.Linear(config.hidden, config.hidden, bias=False) if config.direct else nn.Identity()
        self.lm_head = nn.Linear(config.hidden, config.draft_vocab, bias=False)
        # Target id of each draft id: everything that leaves the head speaks the target's ids.
        self.register_buffer("target_ids", torch.arange(config.draft_vocab), persistent=False)
        self.target_ids: Tensor

    @property
    def shape(self) -> HeadShape:
        """What a caller must keep room for."""
        config = self.config
        return HeadShape(config.hidden, config.kv_heads, config.head_dim, config.head_dim)

    def fuse(self, features: Tensor) -> Tensor:
        """[rows, layers * target_hidden] features of the target to [rows, hidden] hidden states of the head."""
        fused: Tensor = self.fc(features)
        return fused

    def forward(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step over any rows.

        Args:
            embeddings: [rows, hidden] the target's embedding of the token behind each row's position.
            hidden: [rows, hidden] `fuse(...)`, or `carry(...)` of what this function returned for the row before.
            positions: int64 [rows].
            attend: Attention over the caller's keys and values.

        Returns:
            [rows, hidden]: what `carry` makes the next step's hidden state of, and what `logits` reads.
        """
        stepped: Tensor = self.midlayer(embeddings, hidden, positions, attend)
        return stepped

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, draft_vocab] logits of the token two behind each row's position, over draft ids."""
        scored: Tensor = self.lm_head(self.norm(hidden))
        return scored

    def key_value(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [rows, kv_heads, head_dim] alone, for rows whose output nobody reads."""
        layer = self.midlayer
        both = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], dim=-1)
        return layer.self_attn.key_value(both, positions)


class _Norm(nn.RMSNorm):
    """Takes its input's dtype, so that weights kept in float32 for training meet bfloat16 activations."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.embed_proj: nn.Linear | None = None
        if config.direct:
            self.embed_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.input_layernorm = _Norm(config.hidden, eps=config.norm_eps)
        self.hidden_norm = _Norm(config.hidden, eps=config.norm_eps)
        self.post_attention_layernorm = _Norm(config.hidden, eps=config.norm_eps)

    def forward(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        both, residual = self.mix(embeddings, hidden)
        hidden = residual + self.self_attn(both, positions, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def mix(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, 2 * hidden] input of the attention, and the residual."""
        normed, token = self.hidden_norm(hidden), self.input_layernorm(embeddings)
        residual = normed if self.norm_before_residual else hidden
        if self.embed_proj is not None:
            residual = residual + self.embed_proj(token)
        return torch.cat([token, normed], dim=-1), residual


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.width = config.head_dim
        self.rope = config.rope_theta, config.rope_scaling
        self.q_proj = nn.Linear(2 * config.hidden, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, both: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        query = rotate(self.q_proj(both).unflatten(-1, (-1, self.width)), positions, *self.rope)
        key, value = self.key_value(both, positions)
        out: Tensor = self.o_proj(attend(query, key, value).flatten(-2))
        return out

    def key_value(self, both: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        key = self.k_proj(both).unflatten(-1, (-1, self.width))
        return rotate(key, positions, *self.rope), self.v_proj(both).unflatten(-1, (-1, self.width))


class _Mlp(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


def rotate(states: Tensor, positions: Tensor, theta: float, scaling: Llama3Rope | None = None) -> Tensor:
    """Rotary embedding in the half-split form of Llama checkpoints: states [rows, heads, width], positions [rows]."""
    half = states.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, device=states.device, dtype=torch.float32) / half)
    if scaling is not None:
        frequencies = _stretched(frequencies, scaling)
    angles = positions[:, None, None].float() * frequencies
    cosine, sine = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    first, second = states[..., :half], states[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def _stretched(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Slow rotations are slowed by the factor, fast ones left, those between blended."""
    turns = scaling.positions * frequencies / (2 * math.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
