"""Training of drafts: prompts, the target's own answers, the unrolled loss, and a whole small run."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.engine.eagle3 import Eagle3Config, Eagle3Head
from outrider.engine.eagle3_checkpoint import load
from outrider.errors import InvalidArgument
from outrider.models import ResolvedModel
from outrider.training import command
from outrider.training.batches import Batch, collate
from outrider.training.fit import FittingRows, fit_start, fitting_rows
from outrider.training.flight import Asked
from outrider.training.generate import GenerationPlan, imagine
from outrider.training.held_out import is_held_out, measure
from outrider.training.initial import feature_layers
from outrider.training.loop import Trainer, TrainingPlan, held_out_lessons
from outrider.training.loss import sparse_loss
from outrider.training.plan import PASSES, Budget, Kind, Speed, estimate
from outrider.training.prompts import CYCLE, IMAGINED, BuiltinPrompts, FilePrompts, Library, Prompt
from outrider.training.pruned import LmTrainer, pruned
from outrider.training.run import Options, Run
from outrider.training.store import Store
from outrider.training.teacher import Lesson, Teacher
from outrider.training.unroll import Unroll
from tests.unit.tiny import tiny_llama

CPU = torch.device("cpu")
VOCAB, HIDDEN, STEPS = 60, 16, 4
CONFIG = Eagle3Config(
    hidden=HIDDEN,
    intermediate=24,
    heads=4,
    kv_heads=2,
    head_dim=4,
    target_hidden=HIDDEN,
    feature_layers=(1, 1, 1),
    vocab=VOCAB,
    draft_vocab=40,
    window=9,
    direct=True,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target"), vocab=300, layers=4, tokenizer=True, scale=3.0)


@pytest.fixture
def teacher(folder: Path) -> Teacher:
    return Teacher.load(str(folder), (1, 2, 3), torch.float32, top_k=8, feature_window=6)


def small_head() -> Eagle3Head:
    head = Eagle3Head(CONFIG)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)
    head.target_ids = torch.arange(0, VOCAB, 1)[10:50]
    return head


def random_lesson(seed: int, prompt: int, answer: int, window: int = 5, k: int = 6) -> Lesson:
    generator = torch.Generator().manual_seed(seed)
    start = max(0, prompt - window)
    probabilities = torch.randn(answer, VOCAB, generator=generator).mul(2).softmax(-1).topk(k)
    return Lesson(
        ids=torch.randint(0, VOCAB, (prompt + answer,), generator=generator, dtype=torch.int32),
        prompt_tokens=prompt,
        start=start,
        features=torch.randn(prompt + answer - start, 3 * HIDDEN, generator=generator).bfloat16(),
        top_ids=probabilities.indices.int(),
        top_probs=probabilities.values.half(),
    )


class SerialDraft:
    """Drafting as serving does it: true features first, then the head's own states, keys kept one by one."""

    def __init__(self, head: Eagle3Head, table: Tensor) -> None:
        self._head, self._table = head, table

    def __call__(self, lesson: Lesson, anchor: int, steps: int) -> list[Tensor]:
        """Logits [draft_vocab] of each step of a draft that stands on row `anchor` of the answer."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        place = lesson.prompt_tokens - 1 + anchor
        window = CONFIG.window or 0
        logits = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys.append(key)
            values.append(value)
            behind = len(logits)  # rows of the draft's own before this one: the window counts true positions
            first = max(0, len(keys) - behind - window)
            k = torch.cat(keys[first:]).repeat_interleave(2, 1)
            v = torch.cat(values[first:]).repeat_interleave(2, 1)
            weights = (torch.einsum("qhd,khd->hqk", query, k) / CONFIG.head_dim**0.5).softmax(-1)
            return torch.einsum("hqk,khd->qhd", weights, v)

        hidden = torch.empty(0)
        for position in range(lesson.start, place + steps):
            hidden = self._head.carry(hidden) if position > place else hidden
            if position <= place:
                hidden = self._head.fuse(lesson.features[position - lesson.start].float()[None])
            embedding = self._table[int(lesson.ids[position + 1])][None]
            hidden = self._head(embedding, hidden, torch.tensor([position]), attend)
            if position >= place:
                logits.append(self._head.logits(hidden)[0])
        return logits


def unrolled(head: Eagle3Head, table: Tensor, batch: Batch) -> Unroll:
    return Unroll(head, lambda ids: F.embedding(ids, table), torch.ones(3 * HIDDEN))


@torch.no_grad()
def test_the_unrolled_loss_sees_what_serving_drafts() -> None:
    """Guards the mask and chains of the unroll: a position too many or too few trains for another situation."""
    head, table = small_head(), torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    lessons = [random_lesson(0, 12, 9), random_lesson(1, 3, 6), random_lesson(2, 5, 4)]
    batch = collate(lessons, CPU)
    serial = SerialDraft(head, table)
    draft_ids = {int(target): draft for draft, target in enumerate(head.target_ids)}
    compared = 0
    for number, step in enumerate(unrolled(head, table, batch)(batch, STEPS)):
        for alpha, lesson, anchor in zip(step.alpha, step.lessons.tolist(), step.anchors.tolist(), strict=True):
            q = serial(lessons[lesson], anchor, number + 1)[number].softmax(-1)
            row = anchor + number + 1
            ids, p = lessons[lesson].top_ids[row].tolist(), lessons[lesson].top_probs[row].float()
            expected = sum(min(float(p[i]), float(q[draft_ids[j]])) for i, j in enumerate(ids) if j in draft_ids)
            assert float(alpha) == pytest.approx(expected, abs=2e-3), (number, lesson, anchor)
            compared += 1
    assert compared == sum(max(0, int(rows) - step) for rows in batch.rows for step in range(STEPS))


@torch.no_grad()
def test_a_feature_from_the_next_position_is_noticed() -> None:
    """The planted error for the test above: rows shifted by one must change what is drafted."""
    head, table = small_head(), torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    batch = collate([random_lesson(0, 12, 9)], CPU)
    shifted = replace(batch, features=batch.features.roll(-1, dims=1))
    unroll = unrolled(head, table, batch)
    assert not torch.allclose(unroll(batch, 1)[0].alpha, unroll(shifted, 1)[0].alpha, atol=1e-2)


@torch.no_grad()
def test_the_loss_is_cross_entropy_over_the_ids_that_both_know() -> None:
    """Guards the loss against mass that the draft cannot reach."""
    head, table = small_head(), torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    lesson = random_lesson(3, 4, 3)
    batch = collate([lesson], CPU)
    step = unrolled(head, table, batch)(batch, 1)[0]
    serial = SerialDraft(head, table)
    losses = []
    for anchor in range(2):
        q = serial(lesson, anchor, 1)[0].softmax(-1)
        ids, p = lesson.top_ids[anchor + 1].tolist(), lesson.top_probs[anchor + 1].float()
        places = {int(target): draft for draft, target in enumerate(head.target_ids)}
        known = [(float(p[i]), float(q[places[j]])) for i, j in enumerate(ids) if j in places]
        losses.append(-sum(a * torch.tensor(b).log() for a, b in known))
    assert float(step.loss) == pytest.approx(float(torch.stack(losses).mean()), abs=2e-2)


@pytest.mark.parametrize("acceptance_share", [0.0, 0.7])
def test_gradients_of_the_sparse_loss_are_those_of_its_formula(acceptance_share: float) -> None:
    """Guards the gradient that is made in place of q, against autograd over the plain formula."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (7, 20))
    ids = torch.stack([torch.randperm(20, generator=generator)[:5] for _ in range(7)])
    ids[2, 3] = -1
    p = torch.rand(7, 5, generator=generator).softmax(1) * 0.9

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        q = (hidden @ weight.T).softmax(1).gather(1, ids.clamp(min=0)).float()
        known = ids >= 0
        entropy = -(p * q.log() * known).sum(1)
        alpha = (torch.minimum(p, q) * known).sum(1)
        return ((1 - acceptance_share) * entropy - acceptance_share * alpha.log()).mean()

    results = []
    for loss_of in (plain, lambda h, w: sparse_loss(h, w, ids, p, acceptance_share)[0]):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = loss_of(*inputs)
        (2 * loss).backward()
        results.append((loss.detach(), *(one.grad for one in inputs)))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_thinned_lessons_are_scored_as_all_of_them_are() -> None:
    """Guards the renumbering of lessons that go on: a row must keep its own keys."""
    head, table = small_head(), torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    batch = collate([random_lesson(i, 5 + i, 6 + i) for i in range(4)], CPU)
    unroll = unrolled(head, table, batch)
    torch.manual_seed(0)
    with torch.no_grad():
        whole, thinned = unroll(batch, STEPS), unroll(batch, STEPS, thinning=0.6)
    assert [len(step.lessons.unique()) for step in thinned] == [4, 2, 1, 1]
    for full, part in zip(whole, thinned, strict=True):
        places = {place: i for i, place in enumerate(zip(full.lessons.tolist(), full.anchors.tolist(), strict=True))}
        kept = [places[place] for place in zip(part.lessons.tolist(), part.anchors.tolist(), strict=True)]
        torch.testing.assert_close(part.alpha, full.alpha[kept], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_rest_of_the_target_reads_features_as_its_pass_does(teacher: Teacher) -> None:
    """Guards what the closed-form start is fitted to: the target's own last hidden states."""
    lesson = teacher.answer(
        asked([5], 1.0), max_tokens=20, stop_ids=frozenset(), generator=torch.Generator().manual_seed(1)
    )[0]
    logits = teacher.network.get_output_embeddings()(teacher.finish(lesson)[lesson.prompt_tokens - 1 :])
    assert lesson.start == 0
    found = logits.softmax(-1).gather(1, lesson.top_ids.long())[: len(lesson.top_ids)]
    torch.testing.assert_close(found, lesson.top_probs.float(), rtol=0.1, atol=0.02)
    assert len(teacher.network.get_decoder().layers) == 4


def test_the_closed_form_start_finds_a_target_it_can_express() -> None:
    """Guards the order of the three fits and which weight each goes into."""
    generator = torch.Generator().manual_seed(3)
    head = small_head()
    table = torch.randn(VOCAB, HIDDEN, generator=generator)
    rows = 4000
    features = torch.randn(rows, 3 * HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(0, VOCAB, (rows,), generator=generator)
    token = head.midlayer.input_layernorm(table[ids]).detach()
    from_features = torch.randn(3 * HIDDEN, HIDDEN, generator=generator) * 0.1
    from_token = torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.1
    wanted = features.float() @ from_features + token @ from_token
    finals = (wanted * head.norm.weight).detach()
    fit_start(
        head,
        lambda i: F.embedding(i, table),
        torch.ones(3 * HIDDEN),
        FittingRows(features, ids, finals, torch.arange(rows) < rows - 1),
    )
    torch.testing.assert_close(head.fc.weight, from_features.T, atol=0.02, rtol=0.05)
    assert head.midlayer.embed_proj is not None
    torch.testing.assert_close(head.midlayer.embed_proj(token), token @ from_token, atol=0.05, rtol=0.05)
    assert float(head.midlayer.mlp.down_proj.weight.detach().abs().max()) < 0.05


@torch.no_grad()
def test_greedy_length_counts_unbroken_matches_of_greedy_answers() -> None:
    """Guards the reported figure: a match behind a miss is no accepted token."""
    head, table = small_head(), torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    lesson = random_lesson(0, 12, 8)
    ids = lesson.ids.clone()
    ids[12:] = lesson.top_ids[:, 0]
    lesson = replace(lesson, ids=ids)
    batch = collate([lesson], CPU)
    steps = unrolled(head, table, batch)(batch, 3)
    alive = torch.ones(int(batch.rows[0]), dtype=torch.bool)
    shares = []
    for step in steps:
        alive[step.anchors] &= step.match
        shares.append(float(alive[step.anchors].float().mean()))
    result = measure(unrolled(head, table, batch), [lesson, random_lesson(1, 4, 8)], 3, CPU)
    assert result.greedy == pytest.approx(shares)
    assert result.greedy_length == pytest.approx(1 + sum(shares))


def test_equal_logits_do_not_hide_a_greedy_answer() -> None:
    """Guards the measure: bfloat16 logits are often equal, and longer answers would nearly all be left out."""
    lesson = random_lesson(0, 12, 8)
    ids, probs = lesson.ids.clone(), lesson.top_probs.clone()
    ids[12:] = lesson.top_ids[:, 0]
    probs[3, 1] = probs[3, 0]
    ids[15] = lesson.top_ids[3, 1]
    tied = replace(lesson, ids=ids, top_probs=probs)
    below = replace(tied, top_probs=lesson.top_probs)
    assert collate([tied, below], CPU).greedy.tolist() == [True, False]


def asked(lengths: list[int], temperature: float) -> list[Asked]:
    drawn = random.Random(0)
    return [Asked([drawn.randrange(1, 257) for _ in range(length)], temperature) for length in lengths]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answering_records_what_one_pass_over_the_answer_sees(teacher: Teacher, temperature: float) -> None:
    """Guards padding, the growing cache and the dropping of finished rows: features must be the stream's own."""
    lessons = teacher.answer(
        asked([3, 9, 20, 5], temperature),
        max_tokens=24,
        stop_ids=frozenset(range(0, 300, 9)),
        generator=torch.Generator().manual_seed(3),
    )
    assert len({len(lesson.top_ids) for lesson in lessons}) > 1
    for lesson in lessons:
        again = teacher.read(lesson.ids.tolist(), lesson.prompt_tokens)
        assert (lesson.start, len(lesson.features)) == (again.start, len(again.features))
        torch.testing.assert_close(lesson.features, again.features, rtol=0.02, atol=0.02)
        torch.testing.assert_close(lesson.top_probs, again.top_probs, rtol=0.01, atol=1e-3)


def test_greedy_answers_are_the_models_own(teacher: Teacher) -> None:
    """Guards against training on text that serving never sees."""
    question = asked([7], 0.0)
    lesson = teacher.answer(question, max_tokens=12, stop_ids=frozenset(), generator=torch.Generator())[0]
    prompt = torch.tensor([list(question[0].ids)])
    expected = teacher.network.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert lesson.ids.tolist() == expected[0].tolist()
    assert lesson.ids[7:].tolist() == lesson.top_ids[:, 0].tolist()


def test_an_answer_ends_with_its_stop_id(teacher: Teacher) -> None:
    """Guards against features and tokens of text behind the end."""
    stops = frozenset(range(0, 300, 5))
    lessons = teacher.answer(
        asked([4, 6, 8], 1.0), max_tokens=40, stop_ids=stops, generator=torch.Generator().manual_seed(0)
    )
    for lesson in lessons:
        answer = lesson.ids[lesson.prompt_tokens :].tolist()
        assert not stops & set(answer[:-1])
        assert len(answer) == len(lesson.top_ids) == len(lesson.features) - min(6, lesson.prompt_tokens)


def test_shards_come_back_as_written(tmp_path: Path) -> None:
    """Guards the offsets into the shard's columns."""
    store = Store(tmp_path)
    lessons = [random_lesson(i, 3 + i, 4 + i) for i in range(3)]
    prompts = [Prompt(({"role": "user", "content": str(i)},), "chat") for i in range(3)]
    info = store.write(7, prompts, lessons, ["a", "b", "c"])
    (tmp_path / "shard-00008.partial").write_bytes(b"cut off")
    assert (info.number, info.answers, info.tokens) == (7, 3, 15)
    assert store.info(store.shards()[0]) == info
    for lesson, again in zip(lessons, store.read(store.shards()[0]), strict=True):
        assert lesson.prompt_tokens == again.prompt_tokens
        for name in ("ids", "features", "top_ids", "top_probs"):
            assert torch.equal(getattr(lesson, name), getattr(again, name))
    assert [chat[-1]["content"] for chat in store.library().chats] == ["a", "b", "c"]


def test_shards_beyond_the_limit_are_computed_again(teacher: Teacher, tmp_path: Path) -> None:
    """Guards `--disk-limit`: ids alone on disk, and the lesson that the target's pass over them gives."""
    lessons = teacher.answer(
        asked([3, 70, 5], 1.0), max_tokens=6, stop_ids=frozenset(), generator=torch.Generator().manual_seed(3)
    )
    prompts = [Prompt(({"role": "user", "content": str(i)},), "chat") for i in range(3)]
    Store(tmp_path).write(0, prompts, lessons, ["a", "b", "c"])
    store = Store(tmp_path, limit_bytes=(tmp_path / "shard-00000.safetensors").stat().st_size + 1000)
    store.write(1, prompts, lessons, ["a", "b", "c"])
    first, second = store.shards()
    assert store.kept() == [first]
    assert second.stat().st_size < 3000
    with pytest.raises(RuntimeError, match="ids alone"):
        list(store.read(second))
    store.recall = teacher.read
    (again,) = store.read(second, lambda place: place == 1)
    (known,) = store.read(first, lambda place: place == 1)
    assert torch.equal(again.ids, known.ids)
    assert (again.prompt_tokens, again.start) == (known.prompt_tokens, known.start)
    torch.testing.assert_close(again.features, known.features, rtol=0.02, atol=0.02)


def test_the_disk_limit_leaves_room_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a disk that is full when the first checkpoint is written, and a limit that it cannot keep."""
    monkeypatch.setattr(command, "free_bytes", lambda place: 5_000_000_000)
    assert command._disk_bytes(None, tmp_path, 1_000_000_000) == 4_000_000_000
    assert command._disk_bytes(3.5, tmp_path, 1_000_000_000) == 3_500_000_000
    assert command._disk_bytes(0, tmp_path, 0) == 0
    with pytest.raises(InvalidArgument, match=r"disk_limit: 4\.5 GB.*room for 4\.0 GB"):
        command._disk_bytes(4.5, tmp_path, 1_000_000_000)
    monkeypatch.setattr(command, "free_bytes", lambda place: 1_500_000_000)
    with pytest.raises(InvalidArgument, match=r"1\.5 GB free; checkpoints need 2\.0 GB"):
        command._disk_bytes(None, tmp_path, 1_000_000_000)


def test_held_out_lessons_are_those_that_training_leaves_out(tmp_path: Path) -> None:
    """Guards the reported acceptance against lessons that were trained on, in several shards."""
    store = Store(tmp_path)
    for number in range(2):
        lessons = [random_lesson(100 * number + i, 3, 5) for i in range(20)]
        prompts = [Prompt(({"role": "user", "content": str(i)},), "chat") for i in range(20)]
        store.write(number, prompts, lessons, ["a"] * 20)
    held = {tuple(one.ids.tolist()) for one in held_out_lessons(store)}
    trained = {
        tuple(one.ids.tolist())
        for path in store.shards()
        for place, one in enumerate(store.read(path))
        if not is_held_out(place)
    }
    assert len(held) == sum(is_held_out(place) for place in range(20)) * 2
    assert not held & trained
    learner: Any = SimpleNamespace(plan=TrainingPlan(rows=64), _device=CPU)
    batches = Trainer._epoch(learner, store, random.Random(0))
    seen = {tuple(text[:length].tolist()) for b in batches for text, length in zip(b.texts, b.lengths, strict=True)}
    assert seen == trained
    finished: set[tuple[int, ...]] = set()

    def finish(one: Lesson) -> Tensor:
        finished.add(tuple(one.ids.tolist()))
        return torch.zeros(len(one.features), 4)

    fitting_rows(store, SimpleNamespace(finish=finish))  # type: ignore[arg-type]
    assert finished == trained


def test_builtin_prompts_repeat_for_a_seed_and_differ_between_batches() -> None:
    """Guards resumed runs: a batch asked for again must be the same one."""
    imagined = [f"What is {number}?" for number in range(40)]
    library = Library(texts=["Some text. " * 80], chats=[({"role": "user", "content": "Hi"},)], imagined=imagined)
    batches = [BuiltinPrompts(0).batch(number, 40, library) for number in range(len(CYCLE))]
    assert batches[10] == BuiltinPrompts(0).batch(10, 40, library)
    assert batches[2] != BuiltinPrompts(1).batch(2, 40, library)
    assert [batch[0].kind for batch in batches] == list(CYCLE)
    batches = [batch for batch in batches if batch[0].kind != IMAGINED]
    asked_for = [message["content"] for batch in batches for prompt in batch for message in prompt.messages]
    assert not any("{" in text or "}" in text for text in asked_for)
    of_their_own = [text for text in asked_for if "Some text." not in text and text != "Hi"]
    assert len(set(of_their_own)) > 0.8 * len(of_their_own)


def test_prompts_about_texts_wait_for_texts() -> None:
    """Guards the first batches, when the target has written nothing yet."""
    kinds = {BuiltinPrompts(0).batch(number, 2, Library())[0].kind for number in range(len(CYCLE))}
    assert kinds == {"writing", "chat", "maths", "translation", "questions"}


def test_a_prompt_file_takes_strings_and_conversations(tmp_path: Path) -> None:
    """Guards the three forms of a line, and that a bad one is named."""
    path = tmp_path / "prompts.jsonl"
    conversation = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]}
    path.write_text("\n".join(map(json.dumps, ["a", conversation, {"prompt": "c"}])))
    batch = FilePrompts(path, 0).batch(0, 4, Library())
    assert {prompt.messages[-1]["content"] for prompt in batch} == {"a", "b", "c"}
    path.write_text('"a"\n{"question": 1}')
    with pytest.raises(InvalidArgument, match="line 2"):
        FilePrompts(path, 0)


def test_an_estimate_in_hours_and_one_in_tokens_agree() -> None:
    """Guards the arithmetic that people plan by."""
    speed = Speed(generated_per_s=100.0, trained_per_s=400.0, bytes_per_token=5000.0)
    by_tokens = estimate(Budget(tokens=36_000), speed)
    assert (by_tokens.generating_s, by_tokens.training_s) == (360.0, 36_000 * PASSES / 400)
    assert by_tokens.disk_bytes == 180_000_000
    by_hours = estimate(Budget(hours=1.0), speed)
    assert by_hours.generating_s + by_hours.training_s == pytest.approx(3600.0)
    assert by_hours.tokens == pytest.approx(by_hours.generating_s * 100)


class Watcher:
    def __init__(self) -> None:
        self.estimates: list[str] = []
        self.lengths: list[float] = []

    def planned(self, estimate: object) -> None:
        self.estimates.append(str(estimate))

    def progress(self, stage: str, share: float, detail: str) -> None:
        assert stage in ("answers", "training")
        assert 0.0 <= share <= 1.0

    def evaluated(self, report: object) -> None:
        self.lengths.append(report.acceptance.greedy_length)  # type: ignore[attr-defined]


def run(folder: Path, place: Path, **changes: object) -> Watcher:
    options = Options(
        target=ResolvedModel(str(folder), "tiny", "r1", "apache-2.0", "folder"),
        out=place / "out",
        work=place / "work",
        prompts=None,
        budget=Budget(tokens=200),
        draft_vocab=64,
    )
    watcher = Watcher()
    generation = GenerationPlan(batch=17, max_tokens=12, imagined_tokens=12)
    training = TrainingPlan(rows=64, steps=3, evaluate_s=1000.0)
    Run(replace(options, **changes), watcher, generation, training)()  # type: ignore[arg-type]
    return watcher


def test_a_run_leaves_a_head_that_loads_and_a_card(folder: Path, tmp_path: Path) -> None:
    """Guards the whole command: estimate first, then answers, training, checkpoint and card; then more of it."""
    watcher = run(folder, tmp_path)
    assert len(watcher.estimates) == 1
    assert watcher.lengths
    head = load(tmp_path / "out")
    assert head.config.feature_layers == feature_layers(4)
    assert head.config.draft_vocab == len(head.target_ids) == 64
    text = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: tiny" in text
    assert "apache-2.0" in text
    shards = sorted((tmp_path / "work").glob("shard-*"))
    with pytest.raises(InvalidArgument, match="--resume"):
        run(folder, tmp_path)
    with pytest.raises(InvalidArgument, match="seed"):
        run(folder, tmp_path, resume=True, seed=1)
    run(folder, tmp_path, resume=True, budget=Budget(tokens=400))
    assert sorted((tmp_path / "work").glob("shard-*"))[: len(shards)] == shards


def test_a_run_without_room_on_disk_trains_all_the_same(folder: Path, tmp_path: Path) -> None:
    """Guards the lessons that are computed again while they are trained on."""
    assert run(folder, tmp_path, disk_bytes=0, budget=Budget(tokens=60)).lengths
    assert load(tmp_path / "out").config.draft_vocab == 64
    assert all(path.stat().st_size < 20_000 for path in (tmp_path / "work").glob("shard-*"))


def test_a_pruned_draft_is_an_ordinary_model(folder: Path, tmp_path: Path) -> None:
    """Guards `--kind lm`: layers renumbered for the cache, target's matrices untouched, acceptance as it is served."""
    watcher = run(folder, tmp_path, kind=Kind.LM, layers=2, budget=Budget(tokens=100))
    assert watcher.lengths
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    target = AutoModelForCausalLM.from_pretrained(folder)
    assert draft.config.num_hidden_layers == len(draft.model.layers) == 2
    assert torch.equal(draft.model.embed_tokens.weight, target.model.embed_tokens.weight.bfloat16())
    assert not torch.equal(
        draft.model.layers[1].mlp.up_proj.weight, target.model.layers[3].mlp.up_proj.weight.bfloat16()
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("hello")
    assert draft.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4).shape[1] > 3
    assert "with 2 of its layers" in (tmp_path / "out" / "README.md").read_text()
    run(folder, tmp_path, kind=Kind.LM, layers=2, budget=Budget(tokens=250), resume=True)


def test_a_pruned_drafts_acceptance_is_that_of_its_own_pass(folder: Path, teacher: Teacher) -> None:
    """Guards rows and padding of the distillation: alpha must be that of plain passes over each text."""
    network = pruned(str(folder), 3)
    lessons = teacher.answer(
        asked([5, 9, 3], 0.0), max_tokens=8, stop_ids=frozenset(), generator=torch.Generator().manual_seed(2)
    )
    trainer = LmTrainer(network, str(folder), TrainingPlan(steps=2), CPU)
    alphas, survived = [], [[], []]  # type: ignore[var-annotated]
    for one in lessons:
        with torch.no_grad():
            logits = network(one.ids[None].long()).logits[0, one.prompt_tokens - 1 : -1]
        q = logits.softmax(-1).gather(1, one.top_ids.long())
        alphas.append(torch.minimum(q, one.top_probs.float()).sum(1))
        match = (logits.argmax(-1) == one.ids[one.prompt_tokens :]).tolist()
        survived[0] += match[:-1]
        survived[1] += [a and b for a, b in itertools.pairwise(match)]
    found = trainer._measure(lessons)
    assert found.alpha[0] == pytest.approx(float(torch.cat(alphas).mean()), abs=2e-2)
    assert found.greedy == pytest.approx([sum(s) / len(s) for s in survived], abs=0.1)


def test_imagined_turns_begin_where_the_template_opens_one(folder: Path) -> None:
    """Guards prompts that the target writes: from the template's opening of a turn up to the end of that turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    opened: list[list[int]] = []

    class Writer:
        network = AutoModelForCausalLM.from_pretrained(folder)

        def answer(self, asked: list[Asked], **_: object) -> list[Lesson]:
            opened.extend(list(one.ids) for one in asked)
            ends = [*tokenizer("tell me of the sea", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            endless = ends[:-1]
            texts = [ends if i % 2 else endless for i in range(len(asked))]
            blank = torch.zeros(1)
            return [
                Lesson(torch.tensor([*one.ids, *text]), len(one.ids), 0, blank, blank, blank)
                for one, text in zip(asked, texts, strict=True)
            ]

    turns = imagine(Writer(), tokenizer, GenerationPlan(batch=6), torch.Generator())  # type: ignore[arg-type]
    assert turns == ["tell me of the sea"] * 3
    assert {tokenizer.decode(ids) for ids in opened} == {"user: "}


def test_the_tokenizer_template_is_the_serving_one(folder: Path) -> None:
    """Guards the prompt's form: a draft trained on another template meets prompts it never saw."""
    from outrider.training.generate import render

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = render(tokenizer, Prompt(({"role": "user", "content": "hello"},), "chat"))
    assert tokenizer.decode(ids) == "user: hello\nassistant: "
