"""Ragged passes over paged KV compute what each architecture's plain forward computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from outrider.engine import attention
from outrider.engine.batch import RowRule, Span, build_batch
from outrider.engine.causal_lm import PagedCausalLM
from outrider.engine.invariance import attention_difference, linear_difference, model_difference
from outrider.engine.kv_cache import LayerShape
from outrider.engine.probe import REPLICA_TOLERANCE, probe_architecture, probe_error
from outrider.engine.support import check_supported, longest_stream
from outrider.engine.varlen import varlen_obstacle
from outrider.errors import InvalidArgument, ModelRefused

pytestmark = pytest.mark.usefixtures("one_thread")

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 24}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, **ALTERNATING}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mistral": WINDOW,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi3": WINDOW,
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "starcoder2": WINDOW,
    "glm4": {"head_dim": 16},
    "cohere2": ALTERNATING,
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **ALTERNATING},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
REFUSED = {
    "mamba": "recurrent",
    "jamba": "recurrent",
    "falcon": "AttentionInterface",
    "bloom": "AttentionInterface",
    "mpt": "AttentionInterface",
    "llama4_text": "chunked_attention",
}


def config_of(name: str, **overrides: Any) -> PretrainedConfig:
    settings = BASE | ARCHITECTURES.get(name, {}) | overrides
    if name == "gpt2":
        settings = {key: value for key, value in settings.items() if key not in ("hidden_size", "num_key_value_heads")}
    return CONFIG_MAPPING[name](**settings)


def network_of(name: str, **overrides: Any) -> PagedCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = AutoModelForCausalLM.from_config(config_of(name, **overrides), dtype=torch.float32)
    return PagedCausalLM(network)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_interleaved_streams_agree_with_the_plain_forward(name: str) -> None:
    """Guards every architecture that the README names against a change in transformers or in the attention path."""
    config = config_of(name)
    check_supported(config)
    assert probe_error(network_of(name)) < 1e-5


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_an_architecture_that_cannot_run_is_refused_by_name(name: str, reason: str) -> None:
    """Guards against serving wrong text from a model whose state is not paged KV."""
    config = CONFIG_MAPPING[name]()
    with pytest.raises(ModelRefused, match=f"{name}.*{reason}"):
        check_supported(config)


def spread_sinks(network: PagedCausalLM) -> None:
    """Sinks that differ between heads by more than their initial values do."""
    for layer in network.network.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=2.0, std=2.0, generator=torch.Generator().manual_seed(3))


def test_attention_sinks_agree_with_the_plain_forward() -> None:
    """Guards against a sink of another head, or in another place of the softmax."""
    network = network_of("gpt_oss")
    spread_sinks(network)
    assert probe_error(network) < 1e-5


@pytest.mark.parametrize("error", ["dropped", "of another head"])
def test_the_probe_sees_a_wrong_attention_sink(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above: neither mistake may pass it."""
    network = network_of("gpt_oss")
    spread_sinks(network)
    true_attend = attention.attend

    def wrong(*arguments: Any) -> Tensor:
        *rest, sink = arguments
        return true_attend(*rest, None if error == "dropped" else sink.flip(1))

    monkeypatch.setattr(attention, "attend", wrong)
    assert probe_error(network) > 10 * REPLICA_TOLERANCE


def test_attention_sinks_give_a_row_the_same_bits_in_every_company() -> None:
    """Guards exactness: the explicit softmax must not depend on chunks or batch mates."""
    network = network_of("gpt_oss")
    assert any(shape.sinks for shape in network.shapes.values())
    assert attention_difference(network) is None


def test_sinks_take_the_gather_path() -> None:
    """Guards against a CUDA kernel that drops the sinks."""
    shape = LayerShape(4, 2, 64, 64, None, None, torch.float16, torch.device("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert varlen_obstacle(shape) is None
        assert varlen_obstacle(shape._replace(sinks=True)) == "attention sinks"


@pytest.mark.parametrize("error", ["window", "slots", "softcap", "scale"])
def test_the_probe_refuses_a_planted_error(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the probe itself: a window off by one, keys in the wrong slot or a dropped cap must not pass."""
    true_bias, true_slots, true_attend = attention.Call.bias, attention.slot_index, attention.attend
    if error == "window":
        monkeypatch.setattr(
            attention.Call, "bias", lambda call, window, dtype: true_bias(call, window and window + 1, dtype)
        )
    elif error == "slots":
        monkeypatch.setattr(attention, "slot_index", lambda batch, device: true_slots(batch, device).roll(1))
    elif error == "softcap":
        monkeypatch.setattr(
            attention, "attend", lambda q, k, v, bias, scale, cap, sink: true_attend(q, k, v, bias, scale, None, sink)
        )
    else:
        monkeypatch.setattr(
            attention,
            "attend",
            lambda q, k, v, bias, scale, cap, sink: true_attend(q, k, v, bias, 1.1 * scale, cap, sink),
        )
    with pytest.raises(ModelRefused, match="differ from its plain forward"):
        probe_architecture(config_of("gemma2", attn_logit_softcapping=0.05))


def test_a_part_that_is_switched_off_at_first_does_not_pass_the_probe() -> None:
    """Guards against a replica whose zero-initialised mask factors hide a mask that the engine does not compute."""
    with pytest.raises(ModelRefused, match=r"DogeForCausalLM.*differ from its plain forward"):
        probe_architecture(config_of("doge", architectures=["DogeForCausalLM"]))


def test_a_prefill_step_runs_where_the_output_head_is_called_decoder() -> None:
    """Guards against feeding token ids to the output head."""
    network = network_of("modernbert-decoder", pad_token_id=0, bos_token_id=1, eos_token_id=2, **ALTERNATING)
    network.allocate_kv(1)
    assert network.forward([Span(1, [5, 6, 7], 0, 0, [0], 3, 3)]).shape == (0, 96)


def test_the_self_test_stays_inside_a_short_position_table() -> None:
    """Guards the start of a model with fewer positions than the self-test would like to feed."""
    network = network_of("ctrl", dff=96, max_position_embeddings=256)
    assert model_difference(network, []) is None


def test_the_self_test_leaves_routers_with_a_forward_of_their_own_alone() -> None:
    """Guards the start of mixtures whose router derives from a linear layer and returns other things."""

    class Router(torch.nn.Linear):
        def forward(self, rows: Tensor) -> Any:
            raise AssertionError("called on its own")

    network: Any = SimpleNamespace(network=torch.nn.Sequential(Router(8, 8)))
    assert linear_difference(network, 16, []) is None


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_limited_to_its_original_length(kind: str) -> None:
    """Guards exactness: beyond that length a stream's frequencies would depend on its batch mates."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 256}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    else:
        rope |= {"factor": 2.0}
    config = config_of("llama", rope_parameters=rope)
    with pytest.raises(ModelRefused, match=f"'{kind}'.*at most 256"):
        longest_stream(config, None)
    assert longest_stream(config, 256) == 256


def test_a_longer_limit_than_the_model_has_is_refused() -> None:
    """Guards against positions that the model was never given."""
    with pytest.raises(InvalidArgument, match="max_model_len"):
        longest_stream(config_of("llama"), 513)


def test_a_nan_left_in_a_block_does_not_reach_its_next_owner() -> None:
    """Guards against 0 * NaN: masked keys still enter the sums."""
    network = network_of("llama")
    network.allocate_kv(2)
    span = Span(1, [5, 6, 7], 0, 3, [1], 3, 3)
    clean = network.forward([span])
    assert network.kv is not None
    for layer in network.kv.layers.values():
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    # Padding rows write the scratch block; a real start zeroes it, so it is the one block left clean here.
    network.kv.clear([network.kv.scratch_block])
    assert torch.equal(network.forward([span]), clean)


def test_the_key_length_of_a_call_depends_on_the_position_alone() -> None:
    """Guards the grouping rule that batch invariance rests on."""
    blocks = list(range(64))
    spans = [
        Span(1, [0] * 5, 254, 5, blocks, 0, 0),
        Span(2, [0], 10, 1, blocks, 0, 0),
        Span(3, [0] * 300, 0, 0, blocks, 0, 0),
        Span(4, [0] * 4, 600, 4, blocks, 0, 0),
    ]
    batch = build_batch(spans, block_size=16, scratch_block=64, rule=RowRule(4, 1))
    covered = []
    for group in batch.groups():
        assert ((group.positions // 256 + 1) * 256 == group.keys).all()
        covered.extend(group.rows.reshape(-1).tolist())
    assert sorted(set(covered)) == list(range(batch.tokens))


def test_tolerance_is_far_above_rounding() -> None:
    """Guards the start against refusing a sound model."""
    assert 30 * probe_error(network_of("llama")) <= REPLICA_TOLERANCE
