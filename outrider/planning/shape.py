"""What a decoder-only transformer weighs and computes, from its `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider import models
from outrider.errors import InvalidArgument, ModelUnavailable
from outrider.local.layout import footprint

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's size. Rows are tokens in a pass.

    Attributes:
        weights_bytes: of everything that is loaded.
        weights_source: where that figure comes from: "weight files" or "config".
        dense_bytes: read by every pass, whatever its rows (an embedding table is only looked up).
        expert_bytes: of all experts together; 0 without experts.
        experts, experts_per_token: of a layer.
        active_params: that one row is multiplied with.
        kv_bytes_per_token: of keys and values.
        attention_flops_per_position: of one row, for each position it looks at.
        is_feature_head: whether it builds on the target's hidden states (EAGLE-3).
    """

    name: str
    hidden: int
    weights_bytes: float
    weights_source: str
    dense_bytes: float
    expert_bytes: float
    experts: int
    experts_per_token: int
    active_params: float
    kv_bytes_per_token: int
    attention_flops_per_position: float
    is_feature_head: bool

    def read_bytes(self, rows: float) -> float:
        """Weights that a pass over this many rows reads: with experts, those that at least one row chose.

        Choices are taken as independent and even: 1 - (1 - k / n)^rows of the experts.
        """
        if not self.experts:
            return self.dense_bytes
        return self.dense_bytes + self.expert_bytes * (1 - (1 - self.experts_per_token / self.experts) ** rows)


def load(field: str, name: str, role: models.Role) -> Shape:
    """The shape of a model: a folder (its `config.json` is enough), that file, a hub id, or a name Outrider knows.

    Raises:
        InvalidArgument: the configuration is no decoder-only transformer's; the message names what is missing.
        ModelUnavailable: it cannot be had.
    """
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.name == "config.json" and file.is_file():
        config = json.loads(file.read_text("utf-8"))
        stored = sum(weights.stat().st_size for weights in file.parent.glob("*.safetensors"))
        return shape(field, file.parent.name, config, stored)
    if path.is_dir():
        raise ModelUnavailable(f"{path} has no config.json")
    found = models.describe(name, role=role)
    if not found.config:
        raise InvalidArgument(field, f"{name} has no weights to plan for; name a model with a config.json")
    return shape(field, found.model_id, found.config, found.weight_bytes)


def shape(field: str, name: str, config: Mapping[str, Any], stored_bytes: int = 0) -> Shape:
    """From a configuration; without weight files (`stored_bytes` 0) the parameters are counted.

    Raises:
        InvalidArgument: a size is missing.
    """
    text = config.get("text_config", config)
    try:
        hidden, layers, vocabulary = (int(text[key]) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
        heads = int(text["num_attention_heads"])
    except KeyError as error:
        raise InvalidArgument(field, f"the config.json of {name} has no {error.args[0]}") from None
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_size = int(text.get("head_dim") or hidden // heads)
    gated = 3 if str(text.get("hidden_act", "silu")) in ("silu", "gelu_pytorch_tanh", "swiglu") else 2
    inner = int(text.get("intermediate_size") or 4 * hidden)
    experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
    chosen = int(text.get("num_experts_per_tok") or 0) if experts else 0

    attention = hidden * head_size * (2 * heads + 2 * kv_heads)
    expert = gated * hidden * int(text.get("moe_intermediate_size") or inner)
    feed_forward = 0 if experts else gated * hidden * inner
    shared = (
        int(text.get("n_shared_experts") or 0) * expert
        + int(text.get("shared_expert_intermediate_size") or 0) * gated * hidden
    )
    dense = layers * (attention + feed_forward + shared + 2 * hidden)
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    head = hidden * int(text.get("draft_vocab_size") or vocabulary)
    params = dense + layers * experts * expert + head + (0 if tied else hidden * vocabulary)

    element = _BYTES.get(str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"), 2)
    weights = float(stored_bytes or params * element)
    scale = weights / params  # bytes per parameter: less than an element where the files are quantised
    return Shape(
        name=name,
        hidden=hidden,
        weights_bytes=weights,
        weights_source="weight files" if stored_bytes else "config",
        dense_bytes=scale * (dense + head),
        expert_bytes=scale * layers * experts * expert,
        experts=experts,
        experts_per_token=chosen,
        active_params=float(dense + head + layers * chosen * expert),
        kv_bytes_per_token=footprint(config, int(weights), "auto").kv_bytes_per_token,
        attention_flops_per_position=4.0 * layers * heads * head_size,
        is_feature_head="draft_vocab_size" in text or "eagle" in " ".join(config.get("architectures") or ()).lower(),
    )
