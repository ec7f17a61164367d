"""Dummy weights: a real shape without its weights, marked wherever it could be taken for the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from coordinator.tokenizer import Tokenizer
from draft_service.config import DraftConfig
from outrider import dummy
from outrider.engine.config import EngineConfig
from outrider.engine.model import load_model
from outrider.engine.span import Span
from outrider.errors import InvalidArgument, ModelUnavailable
from outrider.local.options import StackOptions
from outrider.local.stack import make_plan
from tests.service.stack import answer, decoder, draft_service, request, target_service


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json and nothing else."""
    path = tmp_path_factory.mktemp("shape")
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    (path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    return path


def test_weights_are_made_from_the_configuration_and_say_so(folder: Path) -> None:
    """A figure measured on noise must not pass for the model's: name, revision and hash all tell."""
    model = load_model(EngineConfig(model=str(folder), dtype="float32", threads=1, load_format="dummy"))
    assert model.info.model_id.endswith(dummy.MARK)
    assert (model.info.revision, model.info.weight_hash[:6]) == ("dummy", "dummy:")
    model.allocate_kv(8)
    logits = model.forward([Span(1, [1, 2, 3], 0, 1, [0], 3, 3)])
    assert logits.shape == (1, 300)
    assert torch.isfinite(logits).all()


def test_without_the_flag_a_folder_without_weights_is_refused(folder: Path) -> None:
    with pytest.raises(ModelUnavailable):
        load_model(EngineConfig(model=str(folder), dtype="float32", threads=1))


def test_what_has_no_shape_is_refused(tmp_path: Path) -> None:
    """Nothing is ignored in silence."""
    with pytest.raises(ModelUnavailable, match=r"config\.json"):
        dummy.resolve(str(tmp_path), "target")
    with pytest.raises(InvalidArgument, match="load_format"):
        EngineConfig(model="any", load_format="random")


async def test_draft_without_weights_refuses_to_make_some_up() -> None:
    with pytest.raises(InvalidArgument, match="load_format"):
        async with draft_service("ngram", load_format="dummy"):
            pass


def test_plan_of_a_stack_needs_no_weights(folder: Path) -> None:
    target, draft = make_plan(StackOptions(target=str(folder), draft=str(folder / "config.json"), load_format="dummy"))
    assert target.footprint.weights_bytes == draft.footprint.weights_bytes > 100_000


async def test_pair_of_shapes_decodes_at_a_set_acceptance(folder: Path) -> None:
    """What big shapes are measured with where weights cannot be had; the byte tokenizer serves it."""
    async with (
        target_service(str(folder), dtype="float32", load_format="dummy") as target_port,
        draft_service(str(folder), dtype="float32", load_format="dummy") as draft_port,
        decoder(target_port, draft_port, num_speculative_tokens=3) as made,
    ):
        said = await answer(made, request([65, 66, 67], 200, temperature=1.0, synthetic=0.8))
        files = await made.tokenizer_files()
    assert len(said.tokens) == 200
    assert said.stats.num_accepted_draft_tokens / said.stats.num_tested_tokens == pytest.approx(0.8, abs=0.12)
    text = Tokenizer.from_files(files, None).detokenizer((65,), skip_special_tokens=True)
    assert isinstance("".join(text.push(token) for token in (66, 299, 67)) + text.flush(), str)


def test_draft_config_takes_the_flag() -> None:
    assert DraftConfig(model="any", load_format="dummy").engine().is_dummy
