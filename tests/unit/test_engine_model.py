"""Loading a model folder: what is reported, what is refused, and the contract of `forward`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.batch import Span
from outrider.engine.blas import pin_blas
from outrider.engine.config import EngineConfig
from outrider.engine.info import eos_ids, name_and_revision, weight_hash
from outrider.engine.model import LoadedModel, load_model, resolve_dtype
from outrider.errors import DoesNotFit, InvalidArgument, ModelUnavailable
from tests.unit.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")


def config(folder: Path, **overrides: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder), **({"dtype": "float32", "threads": 1, "max_num_batched_tokens": 64} | overrides)
    )


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    loaded = load_model(config(folder, kv_cache_tokens=4096))
    loaded.allocate_kv(64)
    return loaded


def test_info_states_the_facts(model: LoadedModel, folder: Path) -> None:
    """Guards GetInfo, from which operators and the coordinator judge what is being served."""
    info = model.info
    assert (info.model_id, info.revision) == ("tiny-llama", "local")
    assert (info.architecture, info.dtype, info.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert (info.vocab_rows, info.max_positions, info.num_layers) == (128, 2048, 2)
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert info.parameters == sum(
        weight.numel() for weight in AutoModelForCausalLM.from_pretrained(folder).parameters()
    )
    assert info.eos_token_ids == (0,)
    assert (info.attention_backend, info.block_size) == ("gather", 16)
    assert info.invariant, info.invariance_note
    assert model.num_blocks == 4096 // 16


def test_wanted_rows_come_back_in_span_order(model: LoadedModel, folder: Path) -> None:
    """Guards against a verdict drawn from another stream's row."""
    plain = AutoModelForCausalLM.from_pretrained(folder)
    first, second = [3, 1, 4, 1, 5], [9, 2, 6]
    logits = model.forward(
        [Span(1, first, 0, 2, [7], 5, 5), Span(2, [8, 8], 0, 0, [9], 2, 2), Span(3, second, 0, 3, [2], 3, 3)]
    )
    with torch.inference_mode():
        expected = [plain(input_ids=torch.tensor([ids])).logits[0] for ids in (first, second)]
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, torch.cat([expected[0][-2:], expected[1]]), atol=1e-4)


def test_a_step_without_wanted_rows_returns_none_of_them(model: LoadedModel) -> None:
    """Guards chunked prefill, most of whose steps need no logits."""
    assert model.forward([Span(1, [1, 2, 3], 0, 0, [0], 3, 3)]).shape == (0, 128)


def test_truncated_positions_are_written_again(model: LoadedModel) -> None:
    """Guards rollback: KV behind a cut must not survive in the positions that follow."""
    model.forward([Span(1, [1, 2, 3, 50, 60, 70], 0, 0, [4], 3, 3)])
    after_cut = model.forward([Span(1, [4, 5], 3, 2, [4], 3, 3)])
    fresh = model.forward([Span(2, [1, 2, 3, 4, 5], 0, 2, [5], 3, 3)])
    assert torch.equal(after_cut, fresh)


def test_a_missing_folder_is_reported_in_one_line(tmp_path: Path) -> None:
    """Guards against a traceback where a name was mistyped."""
    with pytest.raises(ModelUnavailable) as caught:
        load_model(config(tmp_path / "absent"))
    assert "\n" not in str(caught.value)


def test_a_stream_that_cannot_fit_is_refused_with_the_numbers(folder: Path) -> None:
    """Guards against a service that starts and then can never admit a long request."""
    with pytest.raises(DoesNotFit, match=r"2,048.*512"):
        load_model(config(folder, max_model_len=2048, kv_cache_tokens=512))


def test_streams_are_limited_to_the_pool_where_no_length_was_asked_for(folder: Path) -> None:
    """Guards against promising the model's full context on a small pool."""
    assert load_model(config(folder, kv_cache_tokens=512)).info.max_positions == 512


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int8"),
        ("device", "tpu"),
        ("block_size", 24),
        ("max_model_len", 0),
        ("kv_cache_tokens", -1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 8),
        ("gpu_memory_utilization", 1.5),
        ("threads", 0),
        ("model", ""),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: Any) -> None:
    """Guards against a configuration mistake that only shows under load."""
    with pytest.raises(InvalidArgument) as caught:
        EngineConfig(**({"model": "somewhere"} | {field: value}))
    assert caught.value.field == field


def test_float64_runs_on_one_thread_only() -> None:
    """Guards the precision that tests use as their oracle: threads split its products at rows that change bits."""
    with pytest.raises(InvalidArgument, match="threads"):
        EngineConfig(model="somewhere", dtype="float64", threads=2)


def test_auto_dtype_is_a_type_that_the_cpu_multiplies_fast() -> None:
    """Guards machines without bfloat16 instructions from a tenfold slower default."""
    capabilities = torch.cpu.get_capabilities()
    fast = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    chosen = resolve_dtype(EngineConfig(model="somewhere"), torch.device("cpu"))
    assert chosen == (torch.bfloat16 if fast else torch.float32)


def test_the_weight_hash_tells_two_trainings_apart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards replicas against serving different weights under one name, for sampled hashes of large files too."""
    other = tiny_llama(tmp_path / "other", seed=1)
    again = tiny_llama(tmp_path / "again")
    assert weight_hash(folder) == weight_hash(again) != weight_hash(other)
    monkeypatch.setattr("outrider.engine.info.FULL_HASH_BYTES", 0)
    assert weight_hash(folder) == weight_hash(again) != weight_hash(other)


def test_a_snapshot_folder_names_model_and_revision(tmp_path: Path) -> None:
    """Guards the names in GetInfo for models that came from a hub cache."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    assert name_and_revision(snapshot) == ("org/name", "0123abcd")


def test_end_ids_include_those_of_the_generation_config(tmp_path: Path) -> None:
    """Guards chat models, whose end of turn is listed only there."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    assert eos_ids(tmp_path, 2) == (2, 3, 7)


def test_pinning_the_blas_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards launchers: the setting is ignored once torch is loaded."""
    monkeypatch.delenv("MKL_CBWR", raising=False)
    assert "torch" in sys.modules
    with pytest.raises(RuntimeError, match="before torch"):
        pin_blas()


def test_an_operators_own_choice_of_blas_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a machine on which another code path was found better."""
    monkeypatch.setenv("MKL_CBWR", "AVX512")
    pin_blas()
