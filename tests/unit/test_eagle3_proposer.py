"""A remote head proposes what the head beside its target would propose that computes everything anew each time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.config import EngineConfig
from outrider.engine.eagle3_checkpoint import load
from outrider.engine.eagle3_loader import HeadLimits, brings_embeddings, load_head
from outrider.engine.eagle3_model import Eagle3Model
from outrider.engine.embeddings import load_embeddings
from outrider.errors import ModelUnavailable
from outrider.features import FeatureBlock, Features
from outrider.sampling import Form, Rule, SamplingParams
from outrider.seam import ProposalBatch, StreamOpen
from tests.service.harness import Item, drafted, open_stream, propose
from tests.unit.drafting import Bench
from tests.unit.heads import DRAFT_VOCAB, VOCAB, WINDOW, Reference, random_head, random_target

SLOTS = 5
SAMPLED = SamplingParams(temperature=1.0, max_tokens=1_000)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    target = random_target(tmp_path_factory.mktemp("target"))
    return target, random_head(tmp_path_factory.mktemp("head"), target, direct=True)


@pytest.fixture(scope="module")
def reference(folders: tuple[Path, Path]) -> Reference:
    return Reference(folders[0], load(folders[1], dtype=torch.float32))


def fresh_model(folders: tuple[Path, Path], seats: int = 8) -> Eagle3Model:
    target, head = folders
    return load_head(
        EngineConfig(model=str(head), dtype="float32", threads=1),
        target=target,
        limits=HeadLimits(window=None, seats=seats, slots=SLOTS),
    )


def bench(folders: tuple[Path, Path], seats: int = 8) -> Bench:
    return Bench(fresh_model(folders, seats), num_blocks=seats)


@dataclass
class Text:
    """The coordinator's view of a stream, with features as the target would send them.

    Attributes:
        has: features that the draft has, as far as is known: positions below this one.
        origin: where the head's unbroken features begin.
    """

    stream: StreamOpen
    tokens: list[int]
    has: int = 0
    origin: int = 0
    generation: int = 0
    is_open: bool = False
    asked: int = 0
    x: list[int] = field(default_factory=list)

    @property
    def stream_id(self) -> int:
        return self.stream.stream_id

    def opens(self) -> Iterator[StreamOpen]:
        if not self.is_open:
            self.is_open = True
            yield self.stream

    def block(self, reference: Reference) -> FeatureBlock:
        """What the target answers when asked for features from `has` on."""
        end = len(self.tokens) - 1
        start = max(self.has, end - WINDOW)
        if start > self.has or self.has == 0:
            self.origin = start
        return reference.features(self.tokens, start, end)

    def lost(self) -> None:
        """The draft was started anew."""
        self.is_open, self.has, self.generation = False, 0, self.generation + 1


def text(stream_id: int, rng: np.random.Generator, length: int, form: Form = Form.DENSE) -> Text:
    prompt = rng.integers(0, VOCAB, length).tolist()
    return Text(open_stream(stream_id, prompt, SAMPLED, form=form, draft_key=stream_id), prompt)


def ask(made: Bench, texts: list[Text], gammas: list[int], blocks: dict[int, FeatureBlock]) -> ProposalBatch:
    made.send(
        propose(
            [Item(one.stream_id, one.tokens, 0, one.generation) for one in texts],
            gammas,
            opens=tuple(opened for one in texts for opened in one.opens()),
            features=Features.of(list(blocks.items())),
        )
    )
    batch = made.run()
    slots = drafted(batch)
    for one, gamma in zip(texts, gammas, strict=True):
        one.asked, one.x = gamma, slots[one.stream_id]
    cached = dict(zip(batch.replies.stream_ids.tolist(), batch.replies.cached_lengths.tolist(), strict=True))
    for one in texts:
        one.has = max(cached[one.stream_id] - 1, 0)
    return batch


def check(batch: ProposalBatch, texts: list[Text], reference: Reference) -> None:
    """q of every slot is the reference's; the dense rows are in the order of the batch."""
    rows = iter(batch.slots.dense_q.reshape(-1, VOCAB))
    by_id = {one.stream_id: one for one in texts}
    for stream_id in batch.replies.stream_ids.tolist():
        one = by_id[stream_id]
        assert len(one.x) == one.asked
        for slot, expected in enumerate(reference.q(one.tokens, one.x, one.origin)):
            np.testing.assert_allclose(next(rows), expected, atol=2e-5, err_msg=f"stream {stream_id}, slot {slot}")
    assert next(rows, None) is None


def commit(one: Text, rng: np.random.Generator) -> None:
    """Some slots were accepted; another token follows."""
    k = int(rng.integers(0, len(one.x) + 1))
    one.tokens = [*one.tokens, *one.x[:k], int(rng.integers(0, VOCAB))]


@pytest.mark.parametrize("seed", range(4))
def test_proposals_are_those_of_a_head_that_recomputes_everything(
    folders: tuple[Path, Path], reference: Reference, seed: int
) -> None:
    """Guards against every off-by-one between tokens, positions, features, keys and the head's own hidden states.

    Three streams of different lengths in one message; any number of slots is asked for and accepted. Now and then a
    stretch was decoded plainly (shorter and longer than the window), an item is given up and asked again, features get
    lost on the way, or the draft is started anew.
    """
    rng = np.random.default_rng(seed)
    made = bench(folders)
    texts = [text(index + 1, rng, int(rng.integers(2, 30))) for index in range(3)]
    for _ in range(14):
        event = rng.random()
        if event < 0.15:
            made = bench(folders)
            for one in texts:
                one.lost()
        elif event < 0.3:
            one = texts[int(rng.integers(0, 3))]
            one.tokens = [*one.tokens, *rng.integers(0, VOCAB, int(rng.integers(1, 2 * WINDOW))).tolist()]
        blocks = {one.stream_id: one.block(reference) for one in texts}
        gammas = rng.integers(1, SLOTS + 1, 3).tolist()
        if 0.3 <= event < 0.45:
            unlucky = texts[int(rng.integers(0, 3))]
            lost = blocks.pop(unlucky.stream_id)
            ask(made, texts, gammas, blocks)
            assert unlucky.x == [], "without features there is nothing to stand on"
            unlucky.generation += 1
            assert unlucky.has <= lost.first
            check(ask(made, [unlucky], [2], {unlucky.stream_id: unlucky.block(reference)}), [unlucky], reference)
            for one in texts:
                commit(one, rng)
            continue
        batch = ask(made, texts, gammas, blocks)
        check(batch, texts, reference)
        if 0.45 <= event < 0.6:
            for one in texts:
                one.generation += 1
            check(ask(made, texts, gammas, {}), texts, reference)
        for one in texts:
            commit(one, rng)


@pytest.mark.parametrize("fault", ["late features", "wide window", "moving window"])
def test_the_comparison_sees_small_faults(
    folders: tuple[Path, Path], reference: Reference, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Guards the guard: each planted fault leaves every proposal plausible, and is found."""
    visible = Eagle3Model._visible
    if fault == "wide window":
        monkeypatch.setattr(Eagle3Model, "_visible", lambda self, rows, low: visible(self, rows, low - 1))
    elif fault == "moving window":
        moved = lambda self, rows, low: visible(self, rows, torch.maximum(low, rows - WINDOW + 1))  # noqa: E731
        monkeypatch.setattr(Eagle3Model, "_visible", moved)
    rng = np.random.default_rng(1)
    made, one = bench(folders), text(1, rng, 30)
    with pytest.raises(AssertionError):
        for _ in range(6):
            block = one.block(reference)
            if fault == "late features":
                block = FeatureBlock(block.first, reference.features(one.tokens, block.first - 1, block.end - 1).rows)
            check(ask(made, [one], [SLOTS], {1: block}), [one], reference)
            commit(one, rng)


def test_an_item_dropped_halfway_leaves_no_trace(folders: tuple[Path, Path], reference: Reference) -> None:
    """Guards the keys: rows that the head fed itself must never pass for rows with features."""
    rng = np.random.default_rng(3)
    made, one = bench(folders), text(1, rng, 9)
    made.send(propose([Item(1, one.tokens)], 5, opens=(one.stream,), features=Features.of([(1, one.block(reference))])))
    for _ in range(3):
        made.step()
    one.is_open, one.has, one.generation = True, len(one.tokens) - 1, 1
    sequence = made.streams.get(1)
    assert sequence is not None
    one.tokens = sequence.tokens[:]  # all that was drafted so far became part of the text
    batch = ask(made, [one], [3], {1: one.block(reference)})
    check(batch, [one], reference)


def test_a_stream_that_lost_its_seat_asks_for_everything_again(
    folders: tuple[Path, Path], reference: Reference
) -> None:
    """Guards recovery: without keys the answer must say so, or the head would go on with one row of context."""
    rng = np.random.default_rng(4)
    made, one, other = bench(folders, seats=1), text(1, rng, 20), text(2, rng, 20)
    check(ask(made, [one], [2], {1: one.block(reference)}), [one], reference)
    commit(one, rng)
    made.now += 10
    check(ask(made, [other], [2], {2: other.block(reference)}), [other], reference)
    made.now += 10
    ask(made, [one], [2], {1: one.block(reference)})
    assert (one.x, one.has) == ([], 0)
    one.generation += 1
    check(ask(made, [one], [2], {1: one.block(reference)}), [one], reference)


@pytest.mark.parametrize("damage", ["width", "nan"])
def test_unusable_features_cost_slots_only(folders: tuple[Path, Path], reference: Reference, damage: str) -> None:
    """Guards the other streams' keys: a NaN in the ring would spoil whoever sits there next."""
    rng = np.random.default_rng(5)
    made, one = bench(folders, seats=1), text(1, rng, 20)
    block = one.block(reference)
    bad = block.rows[:, 2:].copy() if damage == "width" else block.rows.copy()
    if damage == "nan":
        bad.view(np.uint16)[3, 5] = 0x7FC0
    ask(made, [one], [2], {1: FeatureBlock(block.first, bad)})
    assert one.x == []
    one.generation += 1
    check(ask(made, [one], [2], {1: one.block(reference)}), [one], reference)


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
