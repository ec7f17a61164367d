"""A head before its training: its shape, the ids it proposes, and weights that give it a start."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from outrider.engine.eagle3 import Eagle3Config, Eagle3Head
from outrider.training.store import Store

WINDOW = 256
"""Positions the head's attention looks back: what it has seen in training, whatever the length of the stream."""

_QUIET = 0.3  # initial size of what the layer adds to its residual


def feature_layers(layers: int) -> tuple[int, int, int]:
    """Low, middle and high layer to fuse of a target with so many (4, 16 and 29 of 30)."""
    return max(1, layers // 7), min(layers // 2 + 1, layers - 1), layers - 1


def head_config(target: Any, fused: tuple[int, ...], draft_vocab: int) -> Eagle3Config:
    """A head of the target's own width. `target` is its transformers config."""
    text = target.get_text_config()
    heads = text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    return Eagle3Config(
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        target_hidden=text.hidden_size,
        feature_layers=fused,
        vocab=text.vocab_size,
        draft_vocab=draft_vocab,
        norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", 10000.0),
        window=WINDOW,
        direct=True,
    )


def frequent_ids(store: Store, count: int, vocab: int) -> Tensor:
    """The ids to draft, rising: those that the target gives most mass over the shards that are kept whole."""
    mass = torch.zeros(vocab, dtype=torch.float64)
    for path in store.kept():
        for one in store.read(path):
            mass.index_add_(0, one.top_ids.flatten().long(), one.top_probs.flatten().double())
    return mass.topk(min(count, vocab)).indices.sort().values


def feature_scale(store: Store) -> Tensor:
    """[layers * hidden] one over the root mean square of each feature, over the first shard that is kept whole."""
    first = [one.features[-len(one.top_ids) :].float() for one in store.read(store.kept()[0])]
    return torch.cat(first).square().mean(0).add(1e-12).rsqrt()


def initial_head(
    config: Eagle3Config, target_ids: Tensor, output_embedding: Tensor, output_norm: Tensor | None, seed: int
) -> Eagle3Head:
    """A head that reads out as the target does: its output matrix (of the ids it knows) and its last norm; else random.

    Args:
        config: Shape.
        target_ids: [draft_vocab] ids it can propose.
        output_embedding: [vocab, hidden] of the target.
        output_norm: [hidden] weight of the target's last norm; unset leaves ones.
        seed: Of the random weights.
    """
    head = Eagle3Head(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1 / math.sqrt(weight.shape[1]), generator=generator)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(_QUIET)
        if output_embedding.shape[1] == config.hidden:
            head.lm_head.weight.copy_(output_embedding[target_ids].float())
            if output_norm is not None:
                head.norm.weight.copy_(output_norm.float())
    head.target_ids = target_ids
    return head
