"""A reduced vocabulary is exact: q has smaller support, and what is emitted has the target's law all the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draft_service.draft_ids import DraftIds
from draft_service.job import Job, Slot
from draft_service.sampler import Sampler
from outrider.distribution import TOTAL
from outrider.engine.sequence import Sequence
from outrider.rule import inverse_cdf, residual
from outrider.sampling import SamplingParams
from tests.service.harness import open_stream

OWNER = b"test coordinator"
VOCAB, KNOWN = 8, np.array([1, 2, 4, 5, 7])
P = np.array([0.2, 0.1, 0.05, 0.25, 0.02, 0.18, 0.15, 0.05])
DRAFT_LOGITS = torch.tensor([1.0, 2.0, 0.5, 0.0, 1.5, 2.5, -1.0, 0.3])
DRAWS = 20_000
LIMIT = 0.015
"""Total variation that this many draws over eight ids stay below; the planted faults' are far above."""


def drawn(sampler: Sampler, columns: torch.Tensor) -> list[Slot]:
    """One slot of each of many streams that differ in their keys only."""
    rows = []
    sequence = Sequence(opened=open_stream(1, [3]), owner=OWNER, deadline=1.0, tokens=[3], committed=1)
    for index in range(DRAWS):
        opened = open_stream(index, [3], SamplingParams(), draft_key=index * 2_654_435_761 + 1)
        rows.append((Job(opened, 0, 1, 1, None, OWNER, 0.0), sequence))
    slots = sampler.draw(columns.repeat(DRAWS, 1), rows, {OWNER: np.empty(0, np.uint32)})
    return [slot for slot in slots if slot is not None]


def emitted(x: NDArray[np.int64], q: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """The rule on one slot each, with q as declared."""
    accepted = rng.random(len(x)) * q[x] < P[x] * (q[x] > 0)
    rest = residual(P[None], q[None])
    return np.where(accepted, x, inverse_cdf(rest.repeat(len(x), axis=0), rng.random(len(x))))


@pytest.mark.parametrize("fault", [None, "draws what it does not declare", "declares what it does not draw"])
def test_the_law_is_the_targets(fault: str | None) -> None:
    """Guards the law where the draft lacks ids that the target likes; a draft that mixes two vocabularies breaks it."""
    reduced = drawn(Sampler(draft_top_k=128, greedy_draft=False, ids=DraftIds(KNOWN, VOCAB)), DRAFT_LOGITS[KNOWN])
    full = drawn(Sampler(draft_top_k=128, greedy_draft=False), DRAFT_LOGITS)
    drawing = full if fault == "draws what it does not declare" else reduced
    declared = (full if fault == "declares what it does not draw" else reduced)[0].support
    assert declared is not None
    q = np.zeros(VOCAB)
    q[declared.ids] = declared.counts / TOTAL
    if fault is None:
        assert set(declared.ids.tolist()) <= set(KNOWN.tolist())
    y = emitted(np.array([slot.token for slot in drawing]), q, np.random.default_rng(0))
    distance = float(np.abs(np.bincount(y, minlength=VOCAB) / DRAWS - P).sum() / 2)
    assert (distance < LIMIT) is (fault is None), distance
