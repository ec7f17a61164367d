"""A tiny configuration of any causal-LM architecture: its defaults with every size cut down by name."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

VOCABULARY = 96
MAX_LAYERS = 8
WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "layers")
ATTENTION_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
                   "encoder_attention_heads", "attention_heads")  # fmt: skip
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "dim_model"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff"), INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("dim_ff", "d_inner", "ffn_hidden_size", "expert_ffn_hidden_size"), INNER),
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(ATTENTION_HEADS, HEADS),
    **dict.fromkeys(("head_dim", "dim_head", "qk_nope_head_dim", "v_head_dim", "kv_channels", "d_kv"), HEAD_DIM),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"), 512),
    # So short that the probe's streams pass them.
    **dict.fromkeys(("sliding_window", "keep_window_size", "attention_chunk_size", "index_topk"), 24),
}
# Where sizes depend on each other under names of their own, and where the defaults leave out what checkpoints have.
ROPE = {"rope_type": "default", "rope_theta": 1e4}
FIXES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gptj": {"rotary_dim": 8},
    "hrm_text": {"num_hidden_layers": 8, "num_layers_per_stack": 1, "L_cycles": 3, "H_cycles": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "xlnet": {"d_head": HEAD_DIM},
    "xmod": {"default_language": "en_XX"},
}


def tiny_config(model_type: str) -> PretrainedConfig:
    """The configuration of a model of a few hundred thousand parameters.

    Raises:
        Exception: whatever the configuration class makes of sizes that do not suit it.
    """
    kind = CONFIG_MAPPING[model_type]
    fields = shrunk(kind().to_dict(), getattr(kind, "attribute_map", {})) | FIXES.get(model_type, {})
    return kind.from_dict(fields)


def shrunk(fields: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """The fields with sizes cut down; configurations inside this one likewise.

    Args:
        fields: `PretrainedConfig.to_dict()`.
        aliases: `attribute_map` of the class: common name -> the name in `fields`.
    """
    by_field = {aliases.get(name, name): size for name, size in SIZES.items()}
    layer_names = [aliases.get(name, name) for name in LAYERS]
    layers = next((fields[name] for name in layer_names if _is_count(fields.get(name))), 0)
    lists = [value for value in fields.values() if isinstance(value, list) and layers and len(value) == layers]
    depth = depth_of(lists)
    small = {}
    for name, value in fields.items():
        if name == "per_layer_config" and isinstance(value, dict):
            small[name] = {layer: shrunk(own, {}) for layer, own in value.items() if int(layer) < depth}
        elif isinstance(value, dict):
            small[name] = shrunk(value, {}) if "model_type" in value else value
        elif any(value is one for one in lists):
            small[name] = value[:depth]
        elif name.endswith("vocab_size") and _is_count(value):
            small[name] = min(value, VOCABULARY)
        elif name == "eos_token_id":
            small[name] = VOCABULARY - 1
        elif name == "is_decoder":
            small[name] = not fields.get("is_encoder_decoder")
        elif name == "head_dim" and value is None:
            small[name] = HEAD_DIM
        elif name.endswith("_token_id") and _is_count(value):
            small[name] = min(value, VOCABULARY - 1)
        elif name in ("num_key_value_heads", "num_kv_heads", "n_head_kv") and _is_count(value):
            heads = next((fields[n] for n in ATTENTION_HEADS if _is_count(fields.get(n))), value)
            small[name] = HEADS if value == heads else min(value, KV_HEADS)
        elif name in by_field and _is_count(value):
            small[name] = depth if name in layer_names else min(value, by_field[name])
        else:
            small[name] = value
    if "qk_rope_head_dim" in small and small.get("head_dim") is not None:
        small["head_dim"] = small["qk_rope_head_dim"]
    return small


def depth_of(lists: list[list[Any]]) -> int:
    """Layers needed to see every kind that lists with one entry per layer speak of; at least 2."""
    depth = 2
    for entries in lists:
        if all(isinstance(entry, str | int | bool) for entry in entries):
            depth = max(depth, *(entries.index(entry) + 1 for entry in set(entries)))
    return min(depth, MAX_LAYERS)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
