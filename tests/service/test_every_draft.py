"""Every kind of draft passes the same ladder: equal greedy text, equal coupled text, the target's law.

A kind that is registered without a case here fails `test_every_kind_has_a_case`. The ladder itself runs real services
and takes a minute or two: `make test-drafts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.decoder import Decoder
from draft_service.kinds import Kind
from outrider.features import FeatureBlock
from outrider.planted import Plant
from outrider.sampling import Rule
from outrider.verify.chi2 import survival
from target_service.features import FeatureRing
from tests.service.stack import answers, decoder, draft_service, request, target_service
from tests.unit.heads import random_head, random_target
from tests.unit.mtp_checkpoints import mtp_target
from tests.unit.tiny import tiny_llama

VOCAB = 64
EVERY_ID = tuple(int(token) for token in np.random.default_rng(8).permutation(VOCAB))
"""A prompt in which whatever comes next has occurred before, so that a look-up always finds something."""
PROMPTS = [EVERY_ID, (5, 6, 7, 5, 6, 7, 5, 6), tuple(range(60, 30, -1))]
STREAMS, AT_ONCE, GAMMA = 640, 64, 3
LEVEL = 1e-4
"""Chance with which an exact draft fails the law's test."""


@dataclass(frozen=True)
class Case:
    """Models of a pair, and what its draft service needs beside."""

    target: str
    draft: str
    draft_fields: dict[str, Any] = field(default_factory=dict)


def causal_lm(folder: Path) -> Case:
    target = tiny_llama(folder / "target", vocab=VOCAB)
    return Case(str(target), str(tiny_llama(folder / "draft", vocab=VOCAB, layers=1, seed=1)))


def eagle3(folder: Path) -> Case:
    target = random_target(folder / "target")
    return Case(str(target), str(random_head(folder / "head", target)))


def mtp(folder: Path) -> Case:
    target = mtp_target(folder / "target")
    return Case(str(target), f"mtp:{target}")


def lookup(name: str) -> Callable[[Path], Case]:
    return lambda folder: Case(str(tiny_llama(folder / "target", vocab=VOCAB)), name, {"prompt_lookup_min": 1})


def stub(_folder: Path) -> Case:
    return Case("stub:markov", "stub:accept?p=0.6")


CASES: dict[Kind, Callable[[Path], Case]] = {
    Kind.CAUSAL_LM: causal_lm,
    Kind.EAGLE3: eagle3,
    Kind.MTP: mtp,
    Kind.NGRAM: lookup("ngram"),
    Kind.SUFFIX: lookup("suffix"),
    Kind.STUB: stub,
}


def with_services(test: Any) -> Any:
    """Marks a rung of the ladder."""
    return pytest.mark.timeout(600)(pytest.mark.drafts(test))


kinds = pytest.mark.parametrize("kind", list(CASES))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@asynccontextmanager
async def pair(case: Case, **fields: Any) -> AsyncIterator[Decoder]:
    async with (
        target_service(case.target, dtype="float32", **fields) as target_port,
        draft_service(case.draft, dtype="float32", **case.draft_fields, **fields) as draft_port,
        decoder(target_port, draft_port) as made,
    ):
        yield made


async def texts(made: Decoder, gamma: int, tokens: int = 24, **fields: Any) -> list[list[int]]:
    wanted = [request(prompt, tokens, gamma=gamma, **fields) for prompt in PROMPTS]
    return [one.tokens for one in await answers(made, wanted)]


async def sample(made: Decoder, gamma: int, first_seed: int, **fields: Any) -> Counter[tuple[int, ...]]:
    """Counts of the second and third token behind a prompt, the first two that a draft can propose."""
    found: Counter[tuple[int, ...]] = Counter()
    for start in range(0, STREAMS, AT_ONCE):
        wanted = [
            request(EVERY_ID, 4, gamma=gamma, temperature=1.0, top_k=2, seed=first_seed + start + n, **fields)
            for n in range(AT_ONCE)
        ]
        found.update(tuple(one.tokens[1:3]) for one in await answers(made, wanted))
    return found


def chance(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """How likely two samples of one law, of equal size, differ so much; rare outcomes are taken together."""
    cells: list[Sequence[int]] = [(one[key], other[key]) for key in {*one, *other}]
    rare = [cell for cell in cells if sum(cell) < 20]
    kept = [cell for cell in cells if sum(cell) >= 20] + ([np.sum(rare, axis=0)] if rare else [])
    distance = sum((a - b) ** 2 / (a + b) for a, b in kept)
    return survival(float(distance), len(kept) - 1)


def test_every_kind_has_a_case() -> None:
    """Guards the next kind of draft: it is exact like the others, or it is not registered."""
    assert set(CASES) == set(Kind)


@with_services
@kinds
async def test_greedy_and_coupled_text_is_plain_decodings(kind: Kind, tmp_path: Path) -> None:
    """Guards exactness, token for token, whatever the draft proposes."""
    async with pair(CASES[kind](tmp_path)) as made:
        assert made.state.draft is not None and made.state.draft.draft_kind == kind
        for fields in ({"temperature": 0.0}, {"rule": Rule.COUPLED, "seed": 4}):
            plain = await texts(made, 0, **fields)
            for gamma in (1, 3, 5):
                assert await texts(made, gamma, **fields) == plain, (fields, gamma)
        assert made.counters.num_drafts > 50
        assert made.counters.num_accepted_tokens > 0


@with_services
@kinds
async def test_the_law_is_the_targets(kind: Kind, tmp_path: Path) -> None:
    """Guards the rejection rule with this kind's q; judging a slot by the row behind it, planted, is seen."""
    async with pair(CASES[kind](tmp_path), allow_planted_errors=True) as made:
        plain = await sample(made, 0, 0)
        drafted = await sample(made, GAMMA, 10_000)
        assert made.counters.num_drafts >= STREAMS
        wrong = await sample(made, GAMMA, 20_000, planted=Plant.ROW_SHIFT)
    assert chance(plain, drafted) > LEVEL
    assert chance(plain, wrong) < LEVEL


def shift_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every feature is that of the position before; a stream's first one stays."""
    block = FeatureRing.block

    def shifted(self: FeatureRing, start: int, end: int) -> FeatureBlock | None:
        right = block(self, start, end)
        if right is None:
            return None
        before = block(self, right.first - 1, right.end - 1)
        rows = np.concatenate([right.rows[:1], before.rows])[-len(right.rows) :] if before is not None else right.rows
        return right._replace(rows=rows)

    monkeypatch.setattr(FeatureRing, "block", shifted)


@with_services
@pytest.mark.parametrize("architecture", ["glm4_moe", "deepseek_v3"])
async def test_features_of_the_row_before_cost_acceptance_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: Any
) -> None:
    """Guards an MTP layer's rows with one that knows what follows: in other places it is right by chance only."""
    folder = mtp_target(tmp_path / "target", architecture, aligned=True)
    case = Case(str(folder), f"mtp:{folder}")
    shares, found = [], []
    for shifted in (False, True):
        if shifted:
            shift_rows(monkeypatch)
        async with pair(case) as made:
            found.append([await texts(made, gamma, temperature=0.0) for gamma in (0, 1, 4)])
            counters = made.counters
            shares.append(counters.num_accepted_tokens / max(counters.num_draft_tokens, 1))
    plain = found[0][0]
    assert all(text == plain for run in found for text in run)
    assert shares[0] > 0.4, shares
    assert shares[1] < 0.5 * shares[0], shares
