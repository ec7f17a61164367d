"""MTP drafts: their names, what of a checkpoint they take, and which checkpoints are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from draft_service.config import DraftConfig
from draft_service.kinds import Kind, kind_of
from outrider import models, mtp
from outrider.engine.config import EngineConfig
from outrider.engine.head_info import HeadLimits
from outrider.engine.mtp_loader import load_mtp
from outrider.errors import ModelRefused, ModelUnavailable
from tests.unit.mtp_checkpoints import DEPTH, HIDDEN, VOCAB, WEIGHTS, mtp_target
from tests.unit.tiny import tiny_llama

LIMITS = HeadLimits(window=None, seats=2, slots=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_target(tmp_path_factory.mktemp("target"), vocab=320)


def changed(folder: Path, to: Path, **fields: object) -> EngineConfig:
    """The configuration for a copy with other fields in its config.json."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).symlink_to(file)
    raw = json.loads((folder / "config.json").read_text()) | fields
    (to / "config.json").unlink()
    (to / "config.json").write_text(json.dumps(raw))
    return EngineConfig(model=str(to), dtype="float32", threads=1)


def test_a_name_is_resolved_to_the_targets_own_folder(folder: Path) -> None:
    """Guards the one download: the layer lies in the target's checkpoint, and is not looked for anywhere else."""
    found = models.resolve(f"mtp:{folder}", role="draft")
    assert (found.path, found.folder) == (f"mtp:{folder}", folder)
    assert mtp.of_target("mtp", "org/name") == "mtp:org/name"
    assert mtp.of_target("ngram", "org/name") == "ngram"
    assert kind_of(DraftConfig(model=found.path)) is Kind.MTP


@pytest.mark.parametrize("name", ["mtp", "mtp:", "mtp:stub:markov"])
def test_a_name_without_a_checkpoint_is_refused(name: str) -> None:
    """Guards the first start by hand, where nothing tells the service what it drafts for."""
    with pytest.raises(ModelUnavailable, match="names no checkpoint"):
        models.resolve(name, role="draft")


def test_a_plan_counts_one_layer(folder: Path) -> None:
    """Guards small cards beside a large target: the draft must not be planned as a second copy of it."""
    whole, draft = models.describe(str(folder)), models.describe(f"mtp:{folder}", role="draft")
    assert draft.config["num_hidden_layers"] == 1
    assert 0 < draft.weight_bytes < whole.weight_bytes


def test_what_is_told_of_the_layer(folder: Path) -> None:
    """Guards GetInfo: the features are one hidden state, the one behind the last layer's norm."""
    model = load_mtp(EngineConfig(model=str(folder), dtype="float32", threads=1), limits=LIMITS)
    assert (model.kind, model.request.layers, model.request.window) == ("mtp", (DEPTH,), 64)
    assert (model.info.num_layers, model.info.hidden_size, model.info.vocab_rows) == (1, HIDDEN, 320)
    assert model.info.parameters < sum(tensor.numel() for tensor in load_file(folder / WEIGHTS).values()) / 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_nextn_predict_layers": 0}, "names no MTP layers"),
        ({"num_hidden_layers": DEPTH + 1}, "lacks the MTP layers"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_what_cannot_be_drafted_with_is_refused(
    folder: Path, tmp_path: Path, fields: dict[str, object], named: str
) -> None:
    """Guards against random weights, which would draft noise in silence."""
    with pytest.raises(ModelRefused, match=named):
        load_mtp(changed(folder, tmp_path / "changed", **fields), limits=LIMITS)


def test_an_architecture_without_such_layers_is_refused(tmp_path: Path) -> None:
    """Guards the message: it names the architecture."""
    config = EngineConfig(model=str(tiny_llama(tmp_path, vocab=VOCAB)), dtype="float32", threads=1)
    with pytest.raises(ModelRefused, match="LlamaForCausalLM: transformers knows no MTP layers"):
        load_mtp(config, limits=LIMITS)


def test_a_checkpoint_without_copies_of_what_is_shared_loads(folder: Path, tmp_path: Path) -> None:
    """Guards newer checkpoints, which store embeddings and output head once."""
    config = changed(folder, tmp_path / "slim")
    tensors = load_file(folder / WEIGHTS)
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(("2.embed_tokens.weight", "head.head.weight"))
    }
    assert len(kept) == len(tensors) - 2
    (tmp_path / "slim" / WEIGHTS).unlink()
    save_file(kept, tmp_path / "slim" / WEIGHTS, metadata={"format": "pt"})
    assert load_mtp(config, limits=LIMITS).kind == "mtp"
