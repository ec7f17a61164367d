"""Batch invariance of the default model: every position's logits, bit for bit, however they were computed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.batch import Span
from outrider.engine.causal_lm import PagedCausalLM
from outrider.engine.invariance import check_invariance
from outrider.engine.packing import pack_linears
from tests.model.formats import FORMATS

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

TOKENS = 300
SEED = 11


@pytest.fixture(scope="module", params=FORMATS)
def network(request: pytest.FixtureRequest, default_model_dir: Path) -> Iterator[PagedCausalLM]:
    loaded = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=getattr(torch, request.param))
    pack_linears(loaded)
    network = PagedCausalLM(loaded)
    yield network
    network.kv = None


def logits_of(network: PagedCausalLM, ids: Sequence[int], chunks: Sequence[int], mates: Sequence[int]) -> torch.Tensor:
    """Logits of the last 100 of `ids`, the last chunks fed beside streams of these lengths."""
    rng = random.Random(SEED)
    found, start = [], 0
    for chunk in chunks:
        rows = min(chunk, len(ids) - start)
        spans = [Span(0, ids[start : start + rows], start, rows, range(40), 0, 0)]
        if start >= TOKENS - 100:
            for mate, length in enumerate(mates):
                tokens = [rng.randrange(network.vocab_rows) for _ in range(length)]
                blocks = range(40 + 4 * mate, 44 + 4 * mate)
                spans.insert(mate % 2, Span(mate + 1, tokens, 0, 1, blocks, 0, 0))
        parts = network.forward(spans).split([span.wanted for span in spans])
        found.append(next(part for span, part in zip(spans, parts, strict=True) if span.stream_id == 0))
        start += rows
    return torch.cat(found)[-100:]


def test_the_start_up_test_passes(network: PagedCausalLM) -> None:
    """Guards the flag on the machine the suite runs on."""
    verdict = check_invariance(network, 512)
    assert verdict.invariant, verdict.note


@pytest.mark.parametrize(
    ("steps", "mates"),
    [
        ([60, *[1] * 40], ()),
        ([5] * 20, (1, 5)),
        ([3, 7, 1, 9] * 5, (2, 2, 60)),
        ([50, 50], (1,) * 16),
        ([2] * 50, (9,) * 3),
    ],
    ids=["ones", "fives", "uneven", "halves", "twos"],
)
def test_no_row_differs(network: PagedCausalLM, steps: list[int], mates: tuple[int, ...]) -> None:
    """Guards identical text with speculation on and off, in the precision that is served."""
    rng = random.Random(SEED)
    ids = [rng.randrange(network.vocab_rows) for _ in range(TOKENS)]
    network.allocate_kv(110)
    expected = logits_of(network, ids, [TOKENS], ())
    got = logits_of(network, ids, [128, TOKENS - 228, *steps], mates)
    assert int((got != expected).any(1).sum()) == 0
