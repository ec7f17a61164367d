"""A remote head proposes what the head beside its target would propose that computes everything anew each time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from outrider.engine.config import EngineConfig
from outrider.engine.eagle3_checkpoint import load
from outrider.engine.eagle3_loader import load_head
from outrider.engine.head_info import HeadLimits
from outrider.engine.head_model import HeadModel
from outrider.engine.mtp_loader import load_mtp
from outrider.features import FeatureBlock, Features
from tests.service.harness import Item, propose
from tests.unit import heads
from tests.unit.drafting import Bench
from tests.unit.head_text import SLOTS, Reference, ask, check, commit, text
from tests.unit.heads import VOCAB, WINDOW
from tests.unit.mtp_checkpoints import MtpReference, mtp_target


class Case(NamedTuple):
    """A kind of head: its reference, and how to load it anew for so many seats."""

    reference: Reference
    load: Callable[[int], HeadModel]

    def bench(self, seats: int = 8) -> Bench:
        return Bench(self.load(seats), num_blocks=seats)


def eagle3(folder: Path) -> Case:
    target = heads.random_target(folder / "target")
    head = heads.random_head(folder / "head", target, direct=True)
    config = EngineConfig(model=str(head), dtype="float32", threads=1)
    return Case(
        heads.Reference(target, load(head, dtype=torch.float32)),
        lambda seats: load_head(config, target=target, limits=HeadLimits(None, seats, SLOTS)),
    )


def mtp(folder: Path, architecture: str) -> Case:
    target = mtp_target(folder, "glm4_moe" if architecture == "glm4_moe" else "deepseek_v3")
    config = EngineConfig(model=str(target), dtype="float32", threads=1)
    return Case(MtpReference(target, WINDOW), lambda seats: load_mtp(config, limits=HeadLimits(WINDOW, seats, SLOTS)))


@pytest.fixture(
    scope="module",
    params=["eagle3", *(pytest.param(f"mtp {name}", marks=pytest.mark.drafts) for name in ("glm4_moe", "deepseek_v3"))],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    kind, _, architecture = str(request.param).partition(" ")
    folder = tmp_path_factory.mktemp("heads")
    return eagle3(folder) if kind == "eagle3" else mtp(folder, architecture)


@pytest.mark.parametrize("seed", range(4))
def test_proposals_are_those_of_a_head_that_recomputes_everything(case: Case, seed: int) -> None:
    """Guards against every off-by-one between tokens, positions, features, keys and the head's own hidden states.

    Three streams of different lengths in one message; any number of slots is asked for and accepted. Now and then a
    stretch was decoded plainly (shorter and longer than the window), an item is given up and asked again, features get
    lost on the way, or the draft is started anew.
    """
    rng = np.random.default_rng(seed)
    made = case.bench()
    texts = [text(index + 1, rng, int(rng.integers(2, 30))) for index in range(3)]
    for _ in range(14):
        event = rng.random()
        if event < 0.15:
            made = case.bench()
            for one in texts:
                one.lost()
        elif event < 0.3:
            one = texts[int(rng.integers(0, 3))]
            one.tokens = [*one.tokens, *rng.integers(0, VOCAB, int(rng.integers(1, 2 * WINDOW))).tolist()]
        blocks = {one.stream_id: one.block(case.reference) for one in texts}
        gammas = rng.integers(1, SLOTS + 1, 3).tolist()
        if 0.3 <= event < 0.45:
            unlucky = texts[int(rng.integers(0, 3))]
            lost = blocks.pop(unlucky.stream_id)
            ask(made, texts, gammas, blocks)
            assert unlucky.x == [], "without features there is nothing to stand on"
            unlucky.generation += 1
            assert unlucky.has <= lost.first
            check(
                ask(made, [unlucky], [2], {unlucky.stream_id: unlucky.block(case.reference)}), [unlucky], case.reference
            )
            for one in texts:
                commit(one, rng)
            continue
        batch = ask(made, texts, gammas, blocks)
        check(batch, texts, case.reference)
        if 0.45 <= event < 0.6:
            for one in texts:
                one.generation += 1
            check(ask(made, texts, gammas, {}), texts, case.reference)
        for one in texts:
            commit(one, rng)


@pytest.mark.parametrize("fault", ["late features", "wide window", "moving window"])
def test_the_comparison_sees_small_faults(case: Case, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Guards the guard: each planted fault leaves every proposal plausible, and is found."""
    visible = HeadModel._visible
    if fault == "wide window":
        monkeypatch.setattr(HeadModel, "_visible", lambda self, rows, low: visible(self, rows, low - 1))
    elif fault == "moving window":
        moved = lambda self, rows, low: visible(self, rows, torch.maximum(low, rows - WINDOW + 1))  # noqa: E731
        monkeypatch.setattr(HeadModel, "_visible", moved)
    rng = np.random.default_rng(1)
    made, one = case.bench(), text(1, rng, 30)
    with pytest.raises(AssertionError):
        for _ in range(6):
            block = one.block(case.reference)
            if fault == "late features":
                block = FeatureBlock(
                    block.first, case.reference.features(one.tokens, block.first - 1, block.end - 1).rows
                )
            check(ask(made, [one], [SLOTS], {1: block}), [one], case.reference)
            commit(one, rng)


def test_an_item_dropped_halfway_leaves_no_trace(case: Case) -> None:
    """Guards the keys: rows that the head fed itself must never pass for rows with features."""
    rng = np.random.default_rng(3)
    made, one = case.bench(), text(1, rng, 9)
    made.send(
        propose([Item(1, one.tokens)], 5, opens=(one.stream,), features=Features.of([(1, one.block(case.reference))]))
    )
    for _ in range(3):
        made.step()
    one.is_open, one.has, one.generation = True, len(one.tokens) - 1, 1
    sequence = made.streams.get(1)
    assert sequence is not None
    one.tokens = sequence.tokens[:]  # all that was drafted so far became part of the text
    batch = ask(made, [one], [3], {1: one.block(case.reference)})
    check(batch, [one], case.reference)


def test_a_stream_that_lost_its_seat_asks_for_everything_again(case: Case) -> None:
    """Guards recovery: without keys the answer must say so, or the head would go on with one row of context."""
    rng = np.random.default_rng(4)
    made, one, other = case.bench(seats=1), text(1, rng, 20), text(2, rng, 20)
    check(ask(made, [one], [2], {1: one.block(case.reference)}), [one], case.reference)
    commit(one, rng)
    made.now += 10
    check(ask(made, [other], [2], {2: other.block(case.reference)}), [other], case.reference)
    made.now += 10
    ask(made, [one], [2], {1: one.block(case.reference)})
    assert (one.x, one.has) == ([], 0)
    one.generation += 1
    check(ask(made, [one], [2], {1: one.block(case.reference)}), [one], case.reference)


@pytest.mark.parametrize("damage", ["width", "nan"])
def test_unusable_features_cost_slots_only(case: Case, damage: str) -> None:
    """Guards the other streams' keys: a NaN in the ring would spoil whoever sits there next."""
    rng = np.random.default_rng(5)
    made, one = case.bench(seats=1), text(1, rng, 20)
    block = one.block(case.reference)
    bad = block.rows[:, 2:].copy() if damage == "width" else block.rows.copy()
    if damage == "nan":
        bad.view(np.uint16)[3, 5] = 0x7FC0
    ask(made, [one], [2], {1: FeatureBlock(block.first, bad)})
    assert one.x == []
    one.generation += 1
    check(ask(made, [one], [2], {1: one.block(case.reference)}), [one], case.reference)
