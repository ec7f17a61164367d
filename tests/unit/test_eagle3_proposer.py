"""What EAGLE-3 heads have of their own: a reduced vocabulary, and embeddings that they bring or borrow."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.config import EngineConfig
from outrider.engine.eagle3_checkpoint import load
from outrider.engine.eagle3_loader import brings_embeddings, load_head
from outrider.engine.embeddings import load_embeddings
from outrider.engine.head_info import HeadLimits
from outrider.engine.head_model import HeadModel
from outrider.errors import ModelUnavailable
from outrider.sampling import Rule, SamplingParams
from tests.service.harness import open_stream
from tests.unit.drafting import Bench
from tests.unit.head_text import SLOTS, Text, ask
from tests.unit.heads import DRAFT_VOCAB, VOCAB, Reference, random_head, random_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    target = random_target(tmp_path_factory.mktemp("target"))
    return target, random_head(tmp_path_factory.mktemp("head"), target, direct=True)


@pytest.fixture(scope="module")
def reference(folders: tuple[Path, Path]) -> Reference:
    return Reference(folders[0], load(folders[1], dtype=torch.float32))


def fresh_model(folders: tuple[Path, Path], seats: int = 8) -> HeadModel:
    target, head = folders
    return load_head(
        EngineConfig(model=str(head), dtype="float32", threads=1),
        target=target,
        limits=HeadLimits(window=None, seats=seats, slots=SLOTS),
    )


def bench(folders: tuple[Path, Path], seats: int = 8) -> Bench:
    return Bench(fresh_model(folders, seats), num_blocks=seats)


@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.COUPLED])
@pytest.mark.parametrize(
    "edits", [{}, {"frequency_penalty": 0.5}, {"top_k": 5, "temperature": 0.7}, {"temperature": 0.0}]
)
def test_sparse_slots_speak_the_targets_ids(
    folders: tuple[Path, Path], reference: Reference, rule: Rule, edits: dict[str, float]
) -> None:
    """Guards the reduced vocabulary: a draft id taken for a target id is accepted by chance only."""
    rng = np.random.default_rng(6)
    prompt = rng.integers(0, VOCAB, 20).tolist()
    params = SamplingParams(max_tokens=100, **edits)  # type: ignore[arg-type]
    stream = open_stream(1, prompt, params, rule=rule, draft_key=1, gumbel_key=2)
    made, one = bench(folders), Text(stream, prompt)
    batch = ask(made, [one], [4], {1: one.block(reference)})
    known = set(reference.head.target_ids.tolist())
    assert len(one.x) == 4 and set(one.x) <= known and len(known) == DRAFT_VOCAB
    assert set(batch.slots.q_ids.tolist()) <= known
    if not edits and rule is Rule.STANDARD:
        q = reference.q(one.tokens, one.x, one.origin)
        start = 0
        for slot, size in enumerate(batch.slots.support_sizes.tolist()):
            ids, counts = batch.slots.q_ids[start : start + size], batch.slots.q_counts[start : start + size]
            assert (np.diff(ids.astype(np.int64)) > 0).all()
            kept = q[slot][ids] / q[slot][ids].sum()
            np.testing.assert_allclose((counts + 1.0) / 2**16, kept, atol=2e-4)
            start += size
    if edits.get("temperature") == 0.0:
        assert one.x == reference.q(one.tokens, one.x, one.origin).argmax(1).tolist()


def test_a_head_that_brings_its_embeddings_needs_no_target(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """Guards a draft's machine against fetching a whole target for one tensor that is there already."""
    target, head = folders
    tensors = load_file(head / "model.safetensors")
    save_file({**tensors, "embed_tokens.weight": load_embeddings(target)}, tmp_path / "model.safetensors")
    shutil.copy(head / "config.json", tmp_path)
    assert brings_embeddings(tmp_path) and not brings_embeddings(head)
    load_head(EngineConfig(model=str(tmp_path), dtype="float32"), target=None, limits=HeadLimits(None, 1, 1))


def test_a_head_without_its_target_says_what_to_do(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """Guards the first start with a published head, which brings neither embeddings nor the name of its target."""
    with pytest.raises(ModelUnavailable, match="--embeddings"):
        load_head(EngineConfig(model=str(folders[1]), dtype="float32"), target=None, limits=HeadLimits(None, 1, 1))
