"""EAGLE-3 heads on disk: the published layout, read and written, and the `speculators` layout, read.

Published (SafeAILab/EAGLE): `fc`, `midlayer.*` or `layers.0.*`, `norm`, `lm_head`, `d2t`, `t2d` beside a `config.json`
whose fields are those of a one-layer Llama. `speculators` (vllm-project/speculators): the same tensors as `layers.0.*`,
with the Llama fields under `transformer_layer_config`. `d2t[i]` is *target id - i*; `t2d` marks the ids of the target
that the head knows. Without `d2t` the two vocabularies are equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.engine.eagle3 import Eagle3Config, Eagle3Head, Llama3Rope
from outrider.errors import ModelRefused, ModelUnavailable

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")

_WEIGHTS = "model.safetensors"
_PICKLED = "pytorch_model.bin"
_DIRECT = "outrider_direct_embedding"  # not in the published layout, hence under our name


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` describes an EAGLE-3 head."""
    named = config.get("architectures") or ()
    return config.get("speculators_model_type") == "eagle3" or any(name in ARCHITECTURES for name in named)


def read_config(raw: Mapping[str, Any], *, target_layers: int | None = None) -> Eagle3Config:
    """The shape that a `config.json` of either layout describes.

    Args:
        raw: The parsed file.
        target_layers: Layers of the target, for checkpoints that leave the fused ones to the convention
            (2, n // 2, n - 3); `num_hidden_layers` of the file is the head's own.

    Raises:
        ModelRefused: a field is missing, or asks for something the head does not have.
    """
    layer = raw.get("transformer_layer_config") or raw
    try:
        heads, hidden, vocab = layer["num_attention_heads"], layer["hidden_size"], layer["vocab_size"]
        intermediate = layer["intermediate_size"]
    except KeyError as error:
        raise ModelRefused(f"the EAGLE-3 config lacks {error}") from None
    if (count := layer.get("num_hidden_layers", 1)) != 1:
        raise ModelRefused(f"an EAGLE-3 head of {count} layers; one is supported")
    for field in ("attention_bias", "mlp_bias", "norm_before_fc", "fc_norm"):
        if layer.get(field) or raw.get(field):
            raise ModelRefused(f"an EAGLE-3 head with {field} is not supported")
    if (activation := layer.get("hidden_act", "silu")) != "silu":
        raise ModelRefused(f"an EAGLE-3 head with activation {activation}; silu is supported")
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    return Eagle3Config(
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or hidden // heads,
        target_hidden=raw.get("target_hidden_size") or hidden,
        feature_layers=_feature_layers(raw, target_layers),
        vocab=vocab,
        draft_vocab=raw.get("draft_vocab_size") or vocab,
        norm_eps=layer.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or layer.get("rope_theta") or 10000.0,
        rope_scaling=_rope_scaling(rope),
        window=raw.get("sliding_window"),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        direct=bool(raw.get(_DIRECT, False)),
    )


def load(folder: Path, *, target_layers: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Eagle3Head:
    """Reads a head of either layout.

    Raises:
        ModelUnavailable: the folder cannot be read.
        ModelRefused: its config or tensors are not those of a supported head.
    """
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = _tensors(folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelUnavailable(f"{folder} is not a readable EAGLE-3 head: {error}") from error
    head = Eagle3Head(read_config(raw, target_layers=target_layers)).to(dtype)
    offsets = tensors.pop("d2t", None)
    for name in ("t2d", "embed_tokens.weight"):  # follows from d2t; is the target's
        tensors.pop(name, None)
    try:
        head.load_state_dict({_ours(name): tensor.to(dtype) for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise ModelRefused(f"{folder} does not hold the tensors of an EAGLE-3 head: {error}") from error
    if offsets is not None:
        head.target_ids = offsets.long() + torch.arange(len(offsets))
    ids, config = head.target_ids, head.config
    if len(ids) != config.draft_vocab or len(ids.unique()) != len(ids) or ids.min() < 0 or ids.max() >= config.vocab:
        raise ModelRefused(f"{folder}: d2t does not name {config.draft_vocab} different ids of the target")
    return head.eval()


def save(head: Eagle3Head, folder: Path, *, target: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes the published layout.

    Args:
        head: The head.
        folder: Where; created if missing.
        target: Name of the target it was made for, kept in the config.
        dtype: Of the stored weights.
    """
    config = head.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in head.state_dict().items()}
    ids = head.target_ids.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config.vocab, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    raw = {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        "target_model": target,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else _published_rope(config.rope_scaling),
        "sliding_window": config.window,
        "vocab_size": config.vocab,
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": config.target_hidden,
        "norm_before_residual": config.norm_before_residual,
        **({_DIRECT: True} if config.direct else {}),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        },
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def conventional_layers(target_layers: int) -> tuple[int, int, int]:
    """The fused layers where nothing names them: (2, n // 2, n - 3), as the published heads."""
    return 2, target_layers // 2, target_layers - 3


def _rope_scaling(rope: Mapping[str, Any]) -> Llama3Rope | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelRefused(f"an EAGLE-3 head with {kind} rotary scaling is not supported")
    try:
        return Llama3Rope(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    except KeyError as error:
        raise ModelRefused(f"the rope_scaling of the EAGLE-3 config lacks {error}") from None


def _published_rope(scaling: Llama3Rope) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.positions,
    }


def _feature_layers(raw: Mapping[str, Any], target_layers: int | None) -> tuple[int, ...]:
    named = raw.get("eagle_aux_hidden_state_layer_ids") or (raw.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    if named:
        # `speculators` may list the last layer too: training's verifier output, which the head is not fed.
        return tuple(named[:3])
    if target_layers is None:
        raise ModelRefused("the EAGLE-3 config names no feature layers, and the target's number of layers is not known")
    return conventional_layers(target_layers)


def _tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / _WEIGHTS).is_file():
        return load_file(folder / _WEIGHTS)
    loaded: dict[str, Tensor] = torch.load(folder / _PICKLED, map_location="cpu", weights_only=True)
    return loaded


def _ours(name: str) -> str:
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
