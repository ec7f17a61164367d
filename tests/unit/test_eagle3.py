"""The EAGLE-3 head: its step, and its checkpoints in the layouts that exist."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.engine.eagle3 import Eagle3Config, Eagle3Head, Llama3Rope, rotate
from outrider.engine.eagle3_checkpoint import is_eagle3, load, read_config, save
from outrider.errors import ModelRefused, ModelUnavailable

CONFIG = Eagle3Config(
    hidden=32,
    intermediate=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    target_hidden=32,
    feature_layers=(1, 2, 3),
    vocab=100,
    draft_vocab=40,
    window=64,
)
TARGET_IDS = torch.arange(0, 80, 2)


def random_head(config: Eagle3Config = CONFIG, seed: int = 0) -> Eagle3Head:
    """A head with random weights that proposes even ids."""
    head = Eagle3Head(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    head.target_ids = TARGET_IDS[: config.draft_vocab]
    return head.eval()


def own_row_only(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of rows that see nothing but themselves: each head's value."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


@torch.no_grad()
def step(head: Eagle3Head) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    embeddings, features = torch.randn(3, 32, generator=generator), torch.randn(3, 96, generator=generator)
    return head.logits(head(embeddings, head.fuse(features), torch.arange(3), own_row_only))


def raw_config(**changes: Any) -> dict[str, Any]:
    layer = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 100,
        "rms_norm_eps": 1e-5,
    }
    return {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40, **layer, **changes}


def write(folder: Path, raw: dict[str, Any], prefix: str, **more: Tensor) -> Eagle3Head:
    """Writes a random head in a published form and returns it."""
    head = random_head()
    tensors = {name.replace("midlayer.", prefix): tensor for name, tensor in head.state_dict().items()}
    tensors["d2t"] = TARGET_IDS - torch.arange(40)
    tensors["t2d"] = torch.isin(torch.arange(100), TARGET_IDS)
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in {**tensors, **more}.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return head


def test_the_layer_is_the_published_one() -> None:
    """Guards against a residual, norm or concatenation in the wrong place: foreign heads would draft noise."""
    head = random_head()
    layer, f = head.midlayer, torch.nn.functional
    embeddings, hidden = torch.randn(2, 32), torch.randn(2, 32)

    def norm(states: Tensor, weight: Tensor) -> Tensor:
        return states / (states.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    both = torch.cat([norm(embeddings, layer.input_layernorm.weight), norm(hidden, layer.hidden_norm.weight)], -1)
    values = (both @ layer.self_attn.v_proj.weight.T).view(2, 2, 8).repeat_interleave(2, 1).flatten(1)
    expected = hidden + values @ layer.self_attn.o_proj.weight.T
    inner = norm(expected, layer.post_attention_layernorm.weight)
    gate = f.silu(inner @ layer.mlp.gate_proj.weight.T) * (inner @ layer.mlp.up_proj.weight.T)
    expected = expected + gate @ layer.mlp.down_proj.weight.T
    with torch.no_grad():
        got = head(embeddings, hidden, torch.tensor([3, 9]), own_row_only)
    torch.testing.assert_close(got, expected)


def test_rotation_depends_on_distance_only() -> None:
    """Guards the window: features of a prompt's end may be numbered from anywhere."""
    query, key = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(first: int, second: int) -> Tensor:
        return (rotate(query, torch.tensor([first]), 1e4) * rotate(key, torch.tensor([second]), 1e4)).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100))


def test_llama3_rotary_scaling_is_transformers_own() -> None:
    """Guards heads of Llama 3: a wrong stretch costs acceptance in silence."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        max_position_embeddings=131072,
        hidden_size=32,
        num_attention_heads=1,
        head_dim=32,
        rope_parameters={**scaling, "rope_theta": 500000.0},
    )
    states, positions = torch.randn(5, 1, 32), torch.tensor([0, 7, 90, 900, 9000])
    cosine, sine = LlamaRotaryEmbedding(config)(states, positions[None])
    turned = torch.cat([-states[..., 16:], states[..., :16]], -1)
    expected = states * cosine[0][:, None] + turned * sine[0][:, None]
    ours = read_config(raw_config(rope_scaling=scaling, rope_theta=500000.0), target_layers=30)
    torch.testing.assert_close(
        rotate(states, positions, ours.rope_theta, ours.rope_scaling), expected, rtol=0, atol=2e-3
    )


def test_saved_heads_load_as_they_were(tmp_path: Path) -> None:
    """Guards against a field or tensor that `save` forgets."""
    head = random_head(replace(CONFIG, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 8192)))
    save(head, tmp_path / "head", target="a/target", dtype=torch.float32)
    loaded = load(tmp_path / "head", dtype=torch.float32)
    assert loaded.config == head.config
    assert loaded.target_ids.tolist() == TARGET_IDS.tolist()
    torch.testing.assert_close(step(loaded), step(head))


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_the_published_layout_loads(tmp_path: Path, prefix: str) -> None:
    """Guards heads from the hub: both names of the layer, an embedding that is the target's, fused layers unnamed."""
    head = write(tmp_path / "head", raw_config(), prefix, **{"embed_tokens.weight": torch.zeros(100, 32)})
    loaded = load(tmp_path / "head", target_layers=30, dtype=torch.float32)
    assert loaded.config.feature_layers == (2, 15, 27)
    assert loaded.target_ids.tolist() == TARGET_IDS.tolist()
    torch.testing.assert_close(step(loaded), step(head))


def test_the_speculators_layout_loads(tmp_path: Path) -> None:
    """Guards the nested config, its rotary base, and the other place where the residual starts."""
    raw = raw_config()
    nested = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**raw, "rope_theta": 500000.0},
        "draft_vocab_size": 40,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 16, 29, 32],
        "target_hidden_size": None,
    }
    head = write(tmp_path / "head", nested, "layers.0.")
    loaded = load(tmp_path / "head", dtype=torch.float32)
    assert is_eagle3(nested)
    assert loaded.config.rope_theta == 500000.0
    assert loaded.config.feature_layers == (2, 16, 29)
    head.midlayer.norm_before_residual = True
    torch.testing.assert_close(step(loaded), step(head))


def test_without_d2t_draft_ids_are_target_ids(tmp_path: Path) -> None:
    """Guards heads that know the whole vocabulary."""
    head = random_head(replace(CONFIG, draft_vocab=100))
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    (tmp_path / "head").mkdir()
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    (tmp_path / "head" / "config.json").write_text(json.dumps({**raw_config(), "draft_vocab_size": None}))
    assert load(tmp_path / "head", target_layers=30).target_ids.tolist() == list(range(100))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "yarn"),
    ],
)
def test_what_the_head_lacks_is_refused(changes: dict[str, Any], named: str) -> None:
    """Guards against a checkpoint that loads and drafts noise in silence."""
    with pytest.raises(ModelRefused, match=named):
        read_config(raw_config(**changes), target_layers=30)


def test_a_d2t_that_leaves_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """Guards against drafted ids that the target does not have."""
    write(tmp_path / "head", raw_config(), "midlayer.", d2t=torch.full((40,), 99))
    with pytest.raises(ModelRefused, match="d2t"):
        load(tmp_path / "head", target_layers=30)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """Guards against random weights where a file is incomplete."""
    write(tmp_path / "head", raw_config(num_attention_heads=8), "midlayer.")
    with pytest.raises(ModelRefused, match="q_proj"):
        load(tmp_path / "head", target_layers=30)


def test_an_empty_folder_is_unavailable(tmp_path: Path) -> None:
    """Guards the error class: the fault is the folder's, not the head's."""
    with pytest.raises(ModelUnavailable):
        load(tmp_path)


def test_parameters_counts_every_weight() -> None:
    """Guards the size that plans and cards state."""
    head = random_head()
    assert CONFIG.parameters == sum(weight.numel() for weight in head.parameters())
