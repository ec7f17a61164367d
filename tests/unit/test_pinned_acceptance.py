"""Acceptance of a fixed pair on fixed prompts, to three digits: right text alone hides a draft that has become worse.

Everything is keyed: weights, prompts, noise, and rounds without a clock. A change of these figures that is meant is
written here with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from coordinator.request import DecodingRequest
from outrider.engine import causal_lm
from outrider.engine.batch import RaggedBatch
from outrider.engine.config import EngineConfig
from outrider.engine.model import LoadedModel, load_model
from outrider.engine.span import Span
from outrider.sampling import Rule, SamplingParams
from tests.unit.pure_pair import PurePair
from tests.unit.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = 3
TOKENS = 60
GAMMA = 4
NOISE = 0.1
"""Of the draft's weights, relative to their own spread."""

PINNED = {"greedy": 0.211, "standard": 0.471, "coupled": 0.268}
TOLERANCE = 0.01

MODES = {
    "greedy": (0.0, Rule.STANDARD),
    "standard": (1.0, Rule.STANDARD),
    "coupled": (1.0, Rule.COUPLED),
}


def noisy(folder: Path, target: Path, noise: float) -> Path:
    """The target's weights with noise on them."""
    network = LlamaForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel]:
    """Target and draft; the thread count is that of each test."""
    root = tmp_path_factory.mktemp("pair")
    target = tiny_llama(root / "target")
    return _loaded(target), _loaded(noisy(root / "draft", target, NOISE))


def _loaded(folder: Path) -> LoadedModel:
    model = load_model(EngineConfig(model=str(folder), dtype="float32", threads=1, kv_cache_tokens=4096))
    model.allocate_kv(model.num_blocks)
    return model


async def acceptance(mode: str, target: LoadedModel, draft: LoadedModel) -> float:
    """Accepted slots of those drafted, at a gamma of 4."""
    served = PurePair(target, draft, gamma=GAMMA)
    temperature, rule = MODES[mode]
    for index in range(PROMPTS):
        request = DecodingRequest(
            prompt_ids=tuple(5 + (index * place * place) % 100 for place in range(12)),
            params=SamplingParams(temperature=temperature, max_tokens=TOKENS),
            rule=rule,
            seed=index,
        )
        async for _ in served.open(request):
            pass
    return sum(served.rounds) / (GAMMA * len(served.rounds))


@pytest.mark.parametrize("mode", MODES)
async def test_acceptance_is_what_it_was(mode: str, pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Guards against a draft that drifts, loses its KV or mistakes a row, which costs speed and no text."""
    assert await acceptance(mode, *pair) == pytest.approx(PINNED[mode], abs=TOLERANCE)


async def test_a_draft_that_is_a_row_behind_is_seen(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted error: what the draft drafts on with stands one place too far from its prompt."""
    build = causal_lm.build_batch

    def shifted(spans: Sequence[Span], **options: Any) -> RaggedBatch:
        batch = build(spans, **options)
        batch.positions += batch.tokens == len(spans)  # all places alike would not matter to a rotation
        return batch

    target, draft = pair
    monkeypatch.setattr(draft._network, "batch", lambda spans: shifted(spans, **_layout(draft)))
    assert await acceptance("greedy", target, draft) != pytest.approx(PINNED["greedy"], abs=TOLERANCE)


def _layout(model: LoadedModel) -> dict[str, Any]:
    network = model._network
    assert network.kv is not None
    return {"block_size": network.block_size, "scratch_block": network.kv.scratch_block, "rule": network.rule}
