"""The verifier on stub and tiny models, driven step by step: rows, runs, cuts, KV and equality."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.distribution import CountRow, quantise
from outrider.engine.config import EngineConfig
from outrider.engine.model import load_model
from outrider.engine.stub import parse
from outrider.engine.stub_model import load_stub
from outrider.errors import Status
from outrider.rpc.link import Detached
from outrider.sampling import Form, Rule, SamplingParams
from outrider.seam import Cut
from target_service import verifier
from target_service.scoring import judge
from tests.unit import target_driver
from tests.unit.drafting import noted_timing
from tests.unit.target_driver import (
    OWNER,
    Draft,
    Stream,
    Target,
    Verdict,
    close,
    decode,
    guesses,
    nothing,
    plain,
    verify,
)
from tests.unit.tiny import tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=10_000)
SAMPLED = SamplingParams(max_tokens=10_000)


def markov(table: Sequence[Sequence[float]], folder: Path, *, eos: int | None = None) -> Any:
    path = folder / "table.json"
    path.write_text(json.dumps([list(row) for row in table]))
    suffix = "" if eos is None else f"&eos={eos}"
    return load_stub(parse(f"stub:markov?table={path}{suffix}"))


def script(*tokens: int, vocab: int = 64) -> Any:
    return load_stub(parse(f"stub:script?tokens={','.join(map(str, tokens))}&vocab={vocab}"))


@pytest.fixture
def disjoint(tmp_path: Path) -> Any:
    """A law over 12 ids in which each state has two successors of its own, 2 s + 1 and 2 s + 2 (modulo 12)."""
    table = np.zeros((12, 12))
    for state in range(12):
        table[state, _successors(state)] = 0.5
    return markov(table.tolist(), tmp_path)


def _successors(state: int) -> list[int]:
    return [(2 * state + 1) % 12, (2 * state + 2) % 12]


# ---- rows ----


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_each_token_comes_from_the_row_of_its_own_predecessor(disjoint: Any, params: SamplingParams) -> None:
    """Guards against rows off by one and rows of another stream: three streams, right for 0, 2 and 4 of 4 slots."""
    target = Target(disjoint)
    streams = [Stream(index, [3, 4, 5 + index], params, seed=index) for index in range(3)]
    drafts = []
    for stream, k in zip(streams, (0, 2, 4), strict=True):
        x: list[int] = []
        for slot in range(4):
            successors = _successors((stream.tokens + x)[-1])
            x.append(successors[0] if slot < k else (successors[0] + 5) % 12)
        drafts.append(Draft(x))
    target.send(verify(list(zip(streams, drafts, strict=True))))
    for verdict, stream, draft, k in zip(target.settle(), streams, drafts, (0, 2, 4), strict=True):
        context = stream.tokens + draft.x
        assert len(verdict.emit) == 4
        for slot, token in enumerate(verdict.emit):
            assert token in _successors(context[len(stream.tokens) + slot - 1])
        assert verdict.bonus in _successors(context[-1])
        if params is SAMPLED:
            assert verdict.p[:k] == pytest.approx(0.5) and (verdict.p[k : k + 1] < 1e-6).all()
            # The drafted token was rejected, so the other successor is what is left.
            assert all(verdict.emit[slot] != draft.x[slot] for slot in range(4))


@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
def test_a_perfect_draft_gains_a_bonus_each_round(gamma: int) -> None:
    """Guards against a bonus that is dropped: tokens per step = gamma + 1."""
    text = [int(token) for token in np.random.default_rng(1).integers(0, 60, 120)]
    target = Target(script(*text))
    stream = Stream(1, [9, 9], GREEDY)
    decode(target, [stream], lambda s: Draft(text[len(s.text) : len(s.text) + gamma]), 90)
    assert stream.text[:90] == text[:90]
    assert len(target.steps) == -(-90 // (gamma + 1))


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_a_wrong_draft_gains_nothing_and_costs_no_text(gamma: int) -> None:
    """Guards against a first slot that is never verified, and against a roll-back to nothing that keeps stale KV."""
    text = list(range(40))
    target = Target(script(*text))
    stream = Stream(1, [7], GREEDY)
    decode(target, [stream], lambda s: Draft([63] * gamma), 40)
    assert stream.text == text
    assert stream.accepted == 0 and len(target.steps) == 40


@pytest.mark.parametrize("gamma", [1, 4, 15, 16, 17, 20])
def test_proposals_longer_than_a_block(gamma: int) -> None:
    """Guards against rows that run over the last KV block (blocks of 16 tokens)."""
    text = [int(token) for token in np.random.default_rng(2).integers(0, 60, 100)]
    target = Target(script(*text))
    stream = Stream(1, [5] * 14, GREEDY)

    def half_right(s: Stream) -> Draft:
        right = text[len(s.text) : len(s.text) + gamma // 2]
        return Draft(right + [63] * (gamma - len(right)))

    decode(target, [stream], half_right, 70)
    assert stream.text[:70] == text[:70]


# ---- faults ----


class Spoilt:
    """A model whose rows are NaN for one stream."""

    def __init__(self, model: Any, stream_id: int, *, whole: bool) -> None:
        self._model = model
        self.info = model.info
        self._stream_id = stream_id
        self._whole = whole

    def forward(self, spans: Sequence[Any]) -> Tensor:
        logits = self._model.forward(spans).clone()
        row = 0
        for span in spans:
            if span.stream_id == self._stream_id:
                logits[row : row + span.wanted, :: 1 if self._whole else 100] = torch.nan
            row += span.wanted
        return logits


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_nan_reaches_its_own_stream_only(disjoint: Any, params: SamplingParams, whole: bool) -> None:
    """Guards against NaN that slips past a guard, emits an id outside the vocabulary, or takes the batch with it."""
    target = Target(Spoilt(disjoint, 2, whole=whole))
    streams = [Stream(index, [1, 2], params, seed=index) for index in range(4)]
    alone = Stream(0, [1, 2], params, seed=0)
    solo = Target(disjoint)
    solo.send(verify([(alone, Draft([3, 4]))]))
    expected = solo.settle()[0]

    target.send(verify([(stream, Draft([3, 4])) for stream in streams]))
    verdicts = {verdict.stream_id: verdict for verdict in target.settle()}
    assert verdicts[2].status is Status.INTERNAL and "NaN" in verdicts[2].error
    for index in (0, 1, 3):
        assert verdicts[index].status is Status.OK
        assert all(0 <= token < 12 for token in (*verdicts[index].emit, verdicts[index].bonus))
    assert verdicts[0].emit == expected.emit and verdicts[0].bonus == expected.bonus
    assert target.link.finished == 4
    again = Stream(9, [1, 2], params)
    target.send(plain([again], 1))
    assert target.settle()[0].status is Status.OK


@pytest.mark.parametrize("fails", [False, True])
def test_a_spoilt_prefix_is_not_found_again(disjoint: Any, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the next request of the same prompt: what made one row NaN, or its step fail, may lie in its KV."""
    target = Target(Spoilt(disjoint, 2, whole=True))
    prompt = [1, 2] * 20
    if fails:
        monkeypatch.setattr(verifier, "judge", _raising)
        target.send(plain([Stream(2, prompt, GREEDY)], 1))
        with pytest.raises(RuntimeError):
            target.settle()
        monkeypatch.undo()
    else:
        target.send(plain([Stream(2, prompt, GREEDY)], 1))
    assert target.settle()[0].status is Status.INTERNAL
    target.send(plain([Stream(9, prompt, GREEDY)], 1))
    assert target.settle()[0].status is Status.OK
    assert target.verifier.streams.kv.prefix_tokens.found == 0


def _raising(*_: Any) -> Any:
    raise RuntimeError("the device is gone")


def q_row(*pairs: tuple[int, float]) -> CountRow:
    return quantise(np.array([token for token, _ in pairs]), np.array([q for _, q in pairs]))


def ask(target: Target, stream: Stream, draft: Draft) -> Verdict:
    target.send(verify([(stream, draft)]))
    (verdict,) = target.settle()
    return verdict


def test_a_malformed_q_cuts_there_whatever_was_drawn(disjoint: Any) -> None:
    """Guards against dropping the whole proposal (biased), and against believing a q that does not sum to one."""
    broken = CountRow(np.array([4, 7], np.uint32), np.array([30_000, 30_000], np.uint32))
    verdict = ask(
        Target(disjoint), Stream(1, [1], SAMPLED), Draft([3, 7, 4], [q_row((3, 1.0), (5, 1.0)), broken, None])
    )
    assert verdict.status is Status.OK and verdict.cut is Cut.MALFORMED_Q
    assert len(verdict.emit) == 1
    assert verdict.bonus in _successors(3)


def test_a_token_outside_its_own_q_is_a_lie_and_cuts_there(disjoint: Any) -> None:
    """Guards against a draft that samples from one q and declares another."""
    stream = Stream(1, [1], SAMPLED)
    message = verify([(stream, Draft([3, 7], [q_row((3, 0.5), (4, 0.5)), q_row((7, 0.5), (9, 0.5))]))])
    message.slots.draft_ids[1] = 8
    target = Target(disjoint)
    target.send(message)
    (verdict,) = target.settle()
    assert verdict.cut is Cut.LYING_DRAFT
    assert len(verdict.emit) == 1 and verdict.bonus in _successors(3)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_negative_filler_cuts_there(disjoint: Any, at: int) -> None:
    """Guards against -1 used as an index."""
    x = [3, 7, 3]
    x[at] = -1
    verdict = ask(Target(disjoint), Stream(1, [1], SAMPLED), Draft(x))
    assert verdict.cut is Cut.MALFORMED_Q and len(verdict.emit) == at


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_id_that_the_target_lacks_is_an_ordinary_rejection(disjoint: Any, params: SamplingParams) -> None:
    """Guards against an id of a larger draft vocabulary in the embedding, and against calling it a fault."""
    stream = Stream(1, [1], params)
    draft = Draft([3, 100, 7], [q_row((3, 1.0), (4, 1.0)), q_row((7, 0.5), (100, 0.5)), None])
    verdict = ask(Target(disjoint), stream, draft)
    assert verdict.status is Status.OK and verdict.cut is Cut.NONE
    assert len(verdict.emit) == 2 and verdict.p[1] == 0
    assert verdict.emit[1] in ({8} if params is SAMPLED else set(_successors(3)))
    first = stream.accept(verdict, draft)
    assert first <= 1 and len(stream.tokens) == first + 2
    again = ask(Target(disjoint), Stream(2, [1], params), Draft([100]))
    assert again.status is Status.OK and again.emit[0] in _successors(1)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_padding_rows_are_never_drawn(tmp_path: Path, params: SamplingParams) -> None:
    """Guards against an id without a text: of 12 rows only 7 are in the tokenizer, and the law is nearly flat."""
    table = np.full((12, 12), 0.08)
    table[:, 11] = 0.12
    target = Target(markov(table.tolist(), tmp_path), drawable=7)
    stream = Stream(1, [1], params)
    target.send(plain([stream], 300))
    drawn = [verdict.bonus for verdict in target.settle()]
    assert len(drawn) == 300 and max(drawn) < 7
    verdict = ask(Target(markov(table.tolist(), tmp_path), drawable=7), Stream(2, [1], params), Draft([11, 3]))
    assert verdict.status is Status.OK and verdict.p[0] == 0 and verdict.emit[0] < 7


@pytest.mark.parametrize(
    ("tokens", "draft", "field"),
    [([1, 99], Draft([3]), "tokens"), ([1] * 47, Draft([3, 4]), "committed_lengths")],
)
def test_an_impossible_item_is_refused_alone(disjoint: Any, tokens: list[int], draft: Draft, field: str) -> None:
    """Guards against ids outside the vocabulary and positions outside the context, and against losing the neighbour."""
    target = Target(disjoint, max_model_len=48)
    bad, good = Stream(1, tokens, SAMPLED), Stream(2, [1], SAMPLED)
    target.send(verify([(bad, draft), (good, draft)]))
    verdicts = {verdict.stream_id: verdict for verdict in target.settle()}
    assert verdicts[1].status is Status.INVALID_ARGUMENT and field in verdicts[1].error
    assert verdicts[2].status is Status.OK
    assert target.link.finished == 2


# ---- the link's rules ----


def test_an_item_is_answered_once(disjoint: Any) -> None:
    """Guards against two different answers for one key: duplicates, older generations and other slots fall out."""
    target = Target(disjoint)
    stream = Stream(1, [1, 2], SAMPLED)
    stream.generation = 5
    target.send(verify([(stream, Draft([5, 11]))]))
    target.send(verify([(stream, Draft([5, 11]))]))
    target.send(verify([(stream, Draft([6]))]))
    (verdict,) = target.settle()
    assert verdict.emit and len(verdict.emit) == 2
    target.send(verify([(stream, Draft([6]))]))
    stream.generation = 4
    target.send(verify([(stream, Draft([6, 2]))]))
    assert target.settle() == []
    assert target.link.finished == 5, "every item gives its credit back"
    stream.generation = 6
    target.send(verify([(stream, Draft([5, 11]))]))
    (again,) = target.settle()
    assert (again.emit, again.bonus, again.p.tolist()) == (verdict.emit, verdict.bonus, verdict.p.tolist())


def test_unknown_and_foreign_streams_and_gaps_are_told_apart(disjoint: Any) -> None:
    """Guards against a silent miss: NOT_FOUND re-opens, FAILED_PRECONDITION re-sends."""
    target = Target(disjoint)
    stream = Stream(1, [1, 2, 5, 11], SAMPLED)
    message = plain([stream], 1)
    target.send(replace(message, opens=()))
    (unknown,) = target.settle()
    assert unknown.status is Status.NOT_FOUND
    stream.is_open, stream.base = False, 3
    target.send(plain([stream], 1))
    (gap,) = target.settle()
    assert gap.status is Status.FAILED_PRECONDITION and gap.cached == 0
    stream.base = gap.cached
    target.send(plain([stream], 1))
    assert target.settle()[0].status is Status.OK


def test_a_plain_run_draws_what_single_rounds_draw(disjoint: Any) -> None:
    """Guards the noise keys of a run: one run of 12 draws the ids of twelve runs of 1, each with its own echo."""
    single, run = Stream(1, [1, 2], SAMPLED, seed=3), Stream(1, [1, 2], SAMPLED, seed=3)
    decode(Target(disjoint), [single], nothing, 12, run=1)
    target = Target(disjoint)
    target.send(plain([run], 12))
    verdicts = target.settle()
    assert [verdict.committed for verdict in verdicts] == list(range(2, 14))
    assert [verdict.bonus for verdict in verdicts] == single.text
    assert target.link.finished == 1


def test_a_run_is_topped_up_without_a_gap() -> None:
    """Guards against a run that stops, restarts or repeats a token when its credit is extended under way or late."""
    text = list(range(1, 61))
    target = Target(script(*text))
    stream = Stream(1, [9, 9], GREEDY)
    target.send(plain([stream], 8))
    answered: list[Verdict] = []
    for steps in (3, 20, 9):
        for _ in range(steps):
            target.step()
        fresh = target.link.take()
        answered += fresh
        for verdict in fresh[: len(fresh) // 2 or 1]:
            stream.accept(verdict, None)
        target.send(plain([stream], 8))
        for verdict in fresh[len(fresh) // 2 or 1 :]:
            stream.accept(verdict, None)
    answered += target.settle()
    assert [verdict.bonus for verdict in answered] == text[: len(answered)]
    assert len(answered) > 16
    assert target.link.finished == 4


def test_a_newer_item_cuts_a_run() -> None:
    """Guards against a run that goes on after the coordinator changed its mind, and against its leftovers in the KV."""
    text = list(range(1, 40))
    target = Target(script(*text))
    stream = Stream(1, [9, 9], GREEDY)
    target.send(plain([stream], 30))
    for _ in range(6):
        target.step()
    for verdict in target.link.take()[:4]:
        stream.accept(verdict, None)
    stream.generation += 1
    draft = Draft([text[4], text[5], 60])
    target.send(verify([(stream, draft)]))
    (verdict,) = target.settle()
    assert (verdict.generation, verdict.committed) == (1, 6)
    assert stream.accept(verdict, draft) == 2
    assert stream.text == text[:7]
    assert target.link.finished == 2


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, [3, 2]), (5, [3, 4, 5, 6, 7, 2])])
def test_a_run_ends_at_the_first_stop_id_that_counts(tmp_path: Path, min_tokens: int, expected: list[int]) -> None:
    """Guards against tokens behind the stop, and against a stop id before min_tokens."""
    table = np.full((16, 16), 1e-9)
    table[9, 3] = table[15, 3] = 1.0
    for token in range(3, 8):
        table[token, 2], table[token, token + 1] = 0.6, 0.4
    table[[0, 1, 2, 8, 10, 11, 12, 13, 14], 0] = 1.0
    table /= table.sum(axis=1, keepdims=True)
    params = SamplingParams(temperature=0.0, max_tokens=50, stop_token_ids=(2,), min_tokens=min_tokens)
    target = Target(markov(table.tolist(), tmp_path))
    stream = Stream(1, [9], params)
    target.send(plain([stream], 20))
    assert [verdict.bonus for verdict in target.settle()] == expected
    target.send(plain([stream], 20))
    assert target.settle() == []


@pytest.mark.parametrize(("max_tokens", "max_model_len", "expected"), [(5, 64, 5), (50, 12, 10)])
def test_a_run_ends_with_the_tokens_or_the_context(max_tokens: int, max_model_len: int, expected: int) -> None:
    """Guards against a run past the end of the KV and of the answer."""
    target = Target(script(*range(1, 40)), max_model_len=max_model_len)
    target.send(plain([Stream(1, [9, 9], SamplingParams(temperature=0.0, max_tokens=max_tokens))], 30))
    assert len(target.settle()) == expected


def test_many_answers_of_one_token_all_end() -> None:
    """Guards against a full batch that never empties when every stream ends with its prompt: 200 streams, 64 seats."""
    target = Target(script(5), num_blocks=100)
    streams = [Stream(index, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1)) for index in range(200)]
    bonuses = []
    for start in range(0, 200, 50):
        target.send(plain(streams[start : start + 50], 4))
        verdicts = target.settle()
        bonuses += [verdict.bonus for verdict in verdicts]
        target.send(close(*(verdict.stream_id for verdict in verdicts)))
    assert bonuses == [5] * 200
    assert target.link.finished == 200 and len(target.verifier.streams) == 0


# ---- KV ----


def test_streams_end_with_their_blocks_freed(disjoint: Any) -> None:
    """Guards against leaks: closing, losing the link for a lease, and a deadline each free everything."""
    target = Target(disjoint)
    block_manager = target.verifier.streams._block_manager
    streams = [Stream(index, [1] * 40, SAMPLED) for index in range(3)]
    target.send(plain(streams, 3))
    target.settle()
    assert block_manager.used_blocks == 9
    target.send(close(0))
    target.send(close(0))
    target.settle()
    assert block_manager.used_blocks == 6
    target.send(plain([streams[1]], 3))
    target.verifier.receive(Detached(owner=OWNER, epoch=1))
    assert target.settle() == []
    target.now += 11
    assert not target.step()
    assert block_manager.used_blocks == 0 and len(target.verifier.streams) == 0


def test_closing_one_stream_twice_leaves_the_next_alone(disjoint: Any) -> None:
    """Guards against a late cancel that hits the stream which took the place."""
    target = Target(disjoint, max_num_seqs=1)
    first, second = Stream(1, [1, 2], SAMPLED), Stream(2, [1, 2], SAMPLED)
    target.send(plain([first], 5))
    target.step()
    target.send(plain([second], 5, closed=[1]))
    target.send(close(1))
    verdicts = [verdict for verdict in target.settle() if verdict.stream_id == 2]
    assert len(verdicts) == 5


def test_a_stream_longer_than_the_pool_is_refused(disjoint: Any) -> None:
    """Guards against a prompt that waits for ever for blocks that do not exist."""
    target = Target(disjoint, num_blocks=2)
    target.send(plain([Stream(1, [1] * 40, SAMPLED), Stream(2, [1] * 20, SAMPLED)], 1))
    verdicts = {verdict.stream_id: verdict for verdict in target.settle()}
    assert verdicts[1].status is Status.RESOURCE_EXHAUSTED
    assert verdicts[2].status is Status.OK


# ---- equality ----


@pytest.fixture(scope="module", params=["float64", "bfloat16"])
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny random llama and its KV."""
    torch.set_num_threads(1)
    folder = tiny_llama(tmp_path_factory.mktemp(request.param), dtype=getattr(torch, request.param))
    config = EngineConfig(
        model=str(folder), dtype=request.param, threads=1, kv_cache_tokens=4096, max_num_batched_tokens=256
    )
    model = load_model(config)
    model.allocate_kv(model.num_blocks)
    return model


PROMPT_LENGTHS = (1, 2, 7, 13, 31, 60, 61, 64)


@pytest.mark.parametrize(
    ("params", "rule"),
    [(GREEDY, Rule.STANDARD), (replace(SAMPLED, temperature=1.3, top_p=0.9, presence_penalty=0.5), Rule.COUPLED)],
    ids=["greedy", "coupled"],
)
def test_speculation_does_not_change_the_text(llama: Any, params: SamplingParams, rule: Rule) -> None:
    """Guards losslessness, token for token: eight streams of unequal prompts together, random right and wrong drafts of
    random length, chunked prefill, against plain runs one stream at a time."""
    draw = np.random.default_rng(11)
    prompts = {index: draw.integers(1, 128, n).tolist() for index, n in enumerate(PROMPT_LENGTHS)}

    def streams() -> list[Stream]:
        return [Stream(index, prompt, params, rule=rule, seed=index) for index, prompt in prompts.items()]

    def target(**limits: int) -> Target:
        return Target(llama, num_blocks=llama.num_blocks, block_size=llama.info.block_size, **limits)

    reference = {}
    for stream in streams():
        decode(target(), [stream], nothing, 40, run=40)
        reference[stream.stream_id] = stream.text
    assert len({tuple(text) for text in reference.values()}) == len(reference), "the texts must differ to prove a thing"
    together = streams()
    decode(target(max_num_batched_tokens=64), together, guesses(reference, 128, seed=3), 40)
    for stream in together:
        assert stream.text[:40] == reference[stream.stream_id][:40], f"stream {stream.stream_id}"
    assert sum(stream.accepted for stream in together) > 100


@pytest.mark.parametrize("gamma", [1, 4, 15, 16, 17, 20])
def test_every_gamma_gives_the_same_text(llama: Any, gamma: int) -> None:
    """Guards block edges: rounds one slot shorter than a block, as long, and longer (the block has 16 tokens)."""
    limits = {"num_blocks": llama.num_blocks, "block_size": llama.info.block_size}
    assert limits["block_size"] == 16
    alone = Stream(1, [7, 3, 9], SAMPLED, rule=Rule.COUPLED, seed=1)
    decode(Target(llama, **limits), [alone], nothing, 100)
    coins = np.random.default_rng(gamma)

    def draft(stream: Stream) -> Draft:
        right = alone.text[len(stream.text) : len(stream.text) + gamma]
        return Draft([token if coins.random() < 0.9 else int(coins.integers(128)) for token in right])

    speculative = Stream(1, [7, 3, 9], SAMPLED, rule=Rule.COUPLED, seed=1)
    decode(Target(llama, **limits), [speculative], draft, 100)
    assert speculative.text[:100] == alone.text[:100]
    assert speculative.accepted > 20


def test_texts_survive_preemption(llama: Any) -> None:
    """Guards against stale KV and drafted leftovers after preemption: a pool for two and a half of four streams."""

    def streams() -> list[Stream]:
        return [Stream(index, [1, index + 2], SAMPLED, rule=Rule.COUPLED, seed=index) for index in range(4)]

    reference = {}
    for stream in streams():
        decode(Target(llama, num_blocks=64, block_size=llama.info.block_size), [stream], nothing, 60)
        reference[stream.stream_id] = stream.text[:60]
    target = Target(llama, num_blocks=10, block_size=llama.info.block_size)
    together = streams()
    decode(target, together, guesses(reference, 128, seed=5), 60)
    assert {stream.stream_id: stream.text[:60] for stream in together} == reference
    assert target.verifier.scheduler.preemptions > 0
    assert target.verifier.streams._block_manager.used_blocks == 0


def test_nobody_waits_for_the_device_before_something_was_judged(
    disjoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the overlap of host and device: asking how long the pass takes waits for its end."""
    order: list[str] = []

    def judging(*arguments: Any) -> Any:
        order.append("judge")
        return judge(*arguments)

    monkeypatch.setattr(verifier, "judge", judging)
    monkeypatch.setattr(target_driver, "StepTiming", partial(noted_timing, order))
    target = Target(disjoint)
    target.send(plain([Stream(1, [3], SAMPLED)], 2))
    target.settle()
    assert order == ["judge", "measure"] * 2


def test_a_dense_q_beside_one_of_an_unknown_stream_is_asked_for_again(disjoint: Any) -> None:
    """Guards the neighbours of a stream that the target lost: its rows of q would pass for theirs."""
    target = Target(disjoint)
    known, lost = (Stream(index, [1], SAMPLED, form=Form.DENSE) for index in (1, 2))
    lost.is_open = True
    q = np.zeros((1, 12), np.float32)
    q[0, [3, 4]] = 0.5
    drafts = [Draft([3], None, q), Draft([3], None, q[:, ::-1].copy())]
    target.send(verify([(lost, drafts[1]), (known, drafts[0])]))
    verdicts = {verdict.stream_id: verdict for verdict in target.settle()}
    assert (verdicts[2].status, verdicts[1].status) == (Status.NOT_FOUND, Status.UNAVAILABLE)
    known.generation = 1
    target.send(verify([(known, drafts[0])]))
    (verdict,) = target.settle()
    assert verdict.status is Status.OK and verdict.cut is Cut.NONE


def test_dense_and_sparse_forms_agree(disjoint: Any) -> None:
    """Guards the two forms against each other: the same p rows, and the same plain token."""
    sparse = ask(Target(disjoint), Stream(1, [1], SAMPLED), Draft([3, 7], [q_row((3, 0.5), (4, 0.5)), None]))
    dense_q = np.zeros((2, 12), np.float32)
    dense_q[0, [3, 4]], dense_q[1, 7] = 0.5, 1.0
    target = Target(disjoint)
    stream = Stream(1, [1], SAMPLED, form=Form.DENSE)
    target.send(verify([(stream, Draft([3, 7], None, dense_q))]))
    rows = target.link.batches[0].dense_p.reshape(3, 12) if target.step() else np.empty(0)
    assert rows[[0, 1], [3, 7]] == pytest.approx(sparse.p.tolist())
    assert rows.sum(axis=1) == pytest.approx([1, 1, 1])
    broken = dense_q.copy()
    broken[1, 2] = np.nan
    verdict = ask(Target(disjoint), Stream(1, [1], SAMPLED, form=Form.DENSE), Draft([3, 7], None, broken))
    assert verdict.cut is Cut.MALFORMED_Q and len(verdict.emit) == 1
