"""Which models the engine takes, judged from the configuration alone, before any weights are read."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from outrider.errors import InvalidArgument, ModelRefused

# Others (linear attention, Mamba, chunked attention) do not look at all earlier keys, or at a window of them.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

# Their frequencies depend on the longest sequence of the batch once it exceeds the length the model was trained on.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def architecture_of(config: PretrainedConfig) -> str:
    """The model class named by config.json, or the model type."""
    return (config.architectures or [config.model_type])[0]


def check_supported(config: PretrainedConfig) -> None:
    """Refuses models that cannot run on paged KV.

    Raises:
        ModelRefused: names the architecture and the reason.
    """
    architecture = architecture_of(config)
    if config.is_encoder_decoder:
        raise ModelRefused(f"{architecture}: encoder-decoder models are not supported")
    network: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if network is not None and network._is_stateful:
        raise ModelRefused(f"{architecture}: recurrent models keep a state that cannot be cut back to a shorter prefix")
    unknown = sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - LAYER_TYPES)
    if unknown:
        raise ModelRefused(f"{architecture}: the paged attention does not compute layers of type {', '.join(unknown)}")
    # Code that comes with a model folder is in no mapping; the probe judges it.
    if network is not None and not network._supports_attention_backend:
        raise ModelRefused(f"{architecture}: does not route its attention through transformers' AttentionInterface")


def longest_stream(config: PretrainedConfig, max_model_len: int | None) -> int:
    """Longest stream in tokens: the model's limit, or the operator's lower one.

    Raises:
        InvalidArgument: `max_model_len` exceeds the model's limit.
        ModelRefused: rotary frequencies would depend on the longest stream of the batch.
    """
    text = config.get_text_config()
    limit = text.max_position_embeddings
    if max_model_len is not None and max_model_len > limit:
        raise InvalidArgument("max_model_len", f"{max_model_len} exceeds the model's {limit} positions")
    longest = max_model_len or limit
    for parameters in _rope_parameters(text):
        kind = parameters.get("rope_type", "default")
        if kind not in LENGTH_DEPENDENT_ROPE:
            continue
        original = parameters.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        original = original or limit
        if longest > original:
            raise ModelRefused(
                f"{architecture_of(config)}: beyond {original} positions, rope type '{kind}' takes frequencies that "
                f"depend on the longest stream of the batch; set max_model_len to at most {original}"
            )
    return longest


def _rope_parameters(text: PretrainedConfig) -> list[dict[str, Any]]:
    """The rope settings, one or one per layer type."""
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        return []
    if "rope_type" in parameters:
        return [parameters]
    return [value for value in parameters.values() if isinstance(value, dict)]
