"""Draft, target and decoder over real gRPC: the text, the law, acceptance, and what failures leave of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator import acceptance
from coordinator.decoder import Decoder
from outrider.sampling import Form, Rule
from tests.service.harness import ANSWER_WITHIN_S
from tests.service.stack import (
    Answer,
    answer,
    answers,
    config,
    decoder,
    draft_service,
    pair,
    request,
    target_service,
    until,
)
from tests.unit.tiny import tiny_llama

PROMPTS = [(5, 6, 7, 5, 6, 7, 5, 6), (9,), (20, 21, 22, 23, 20, 21), (3, 3, 3), (50, 60, 50, 60, 50)]
TOKENS = [5 + i * i % 90 for i in range(200)]
BLOCK = 16
SCRIPT = "tokens=" + ",".join(map(str, TOKENS))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("llama") / "model", tokenizer=False))


async def texts(made: Decoder, gamma: int | None, max_tokens: int = 48, **fields: object) -> list[list[int]]:
    """One answer per prompt, all at once."""
    wanted = [request(prompt, max_tokens, gamma=gamma, **fields) for prompt in PROMPTS]
    return [one.tokens for one in await answers(made, wanted)]


class TestText:
    """Speculation must not change what is said, token for token."""

    @pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
    async def test_greedy_text_is_the_same_with_the_target_as_its_own_draft(self, llama: str, dtype: str) -> None:
        async with (
            target_service(llama, dtype=dtype) as target,
            draft_service(llama, dtype=dtype) as draft,
            decoder(target, draft, self_draft=True) as made,
        ):
            plain = await texts(made, 0, temperature=0.0)
            assert await texts(made, 4, temperature=0.0) == plain
            assert await texts(made, 1, temperature=0.0) == plain
            assert made.counters.num_accepted_tokens > 0

    @pytest.mark.parametrize(
        ("dtype", "kind"), [("float64", "ngram"), ("float32", "ngram"), ("bfloat16", "ngram"), ("float64", "suffix")]
    )
    async def test_greedy_text_is_the_same_with_a_lookup_draft(self, llama: str, dtype: str, kind: str) -> None:
        async with (
            target_service(llama, dtype=dtype) as target,
            draft_service(kind, prompt_lookup_min=1) as draft,
            decoder(target, draft) as made,
        ):
            plain = await texts(made, 0, 96, temperature=0.0)
            assert await texts(made, 4, 96, temperature=0.0) == plain
            assert made.counters.num_draft_tokens > 0

    async def test_coupled_text_is_the_same_for_every_gamma(self, llama: str) -> None:
        """A seed names one text at temperature 1, whatever the draft does (exactness.md section 4)."""
        async with (
            target_service(llama, dtype="float64") as target,
            draft_service(llama, dtype="float64") as draft,
            decoder(target, draft, self_draft=True) as made,
        ):
            runs = [await texts(made, gamma, rule=Rule.COUPLED, seed=17) for gamma in (0, 1, 4, None)]
            assert runs[0] == runs[1] == runs[2] == runs[3]
            assert made.counters.num_accepted_tokens > 0

    @pytest.mark.drafts
    @pytest.mark.timeout(600)
    async def test_rounds_about_a_block_long_say_the_same(self, llama: str) -> None:
        """Guards the edges of KV blocks: rounds that end before, at and behind one, and reach over two.

        A draft of lower precision is a draft of its own: some of its tokens are wrong.
        """
        modes: list[dict[str, Any]] = [{"temperature": 0.0}, {"rule": Rule.COUPLED, "seed": 5}]
        async with (
            target_service(llama, dtype="float32", block_size=BLOCK) as target,
            draft_service(llama, dtype="bfloat16", block_size=BLOCK, max_slots=32) as draft,
            decoder(target, draft, self_draft=True, max_num_speculative_tokens=20) as made,
        ):
            plain = [await texts(made, 0, **fields) for fields in modes]
            for gamma in (1, 4, BLOCK - 1, BLOCK, BLOCK + 1, 20):
                drafts = made.counters.gamma[gamma]
                assert [await texts(made, gamma, **fields) for fields in modes] == plain
                assert made.counters.gamma[gamma] > drafts
            assert 0 < made.counters.num_accepted_tokens < made.counters.num_tested_tokens

    async def test_sparse_and_dense_forms_say_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The sparse form is an optimisation of the textbook. (A draft that samples rounds its q in the one only.)"""
        monkeypatch.setattr("coordinator.patience.OVERDUE_FLOOR_S", ANSWER_WITHIN_S)
        async with (
            target_service("stub:markov") as target,
            draft_service("stub:perfect", draft_sample_method="greedy") as draft,
            decoder(target, draft) as made,
        ):
            while True:
                skipped = dict(made.counters.draft_skipped)
                sparse, dense = [
                    await answers(made, [request([65], 80, gamma=3, seed=seed, form=form) for seed in range(4)])
                    for form in (Form.SPARSE, Form.DENSE)
                ]
                # Where a round begins decides which noise it uses, and a stream may begin before its draft is ready.
                if made.counters.draft_skipped == skipped:
                    break
            assert [one.tokens for one in sparse] == [one.tokens for one in dense]
            assert all(one.stats.num_accepted_draft_tokens > 0 for one in [*sparse, *dense])

    async def test_stop_id_in_the_middle_of_accepted_tokens_ends_the_answer_there(self) -> None:
        async with pair(f"stub:script?{SCRIPT}", f"stub:perfect?{SCRIPT}") as made:
            whole = (await answer(made, request([1], 40, gamma=4, temperature=0.0))).tokens
            for length in (7, 8, 9, 10, 11):
                stop = whole[length]
                got = await answer(made, request([1], 40, gamma=4, temperature=0.0, stop_token_ids=(stop,)))
                assert got.tokens == whole[: whole.index(stop) + 1]
                assert got.finish_reason == "stop"

    async def test_limits_end_the_answer_with_length(self) -> None:
        async with pair(f"stub:script?{SCRIPT}", f"stub:perfect?{SCRIPT}") as made:
            for limit in (1, 2, 5, 6):
                got = await answer(made, request([1], limit, gamma=4, temperature=0.0))
                assert (len(got.tokens), got.finish_reason) == (limit, "length")


class TestAcceptance:
    async def test_self_draft_is_always_accepted_in_float32(self, llama: str) -> None:
        """An off-by-one in the draft's KV never changes the text, it only kills acceptance in silence."""
        async with (
            target_service(llama, dtype="float32") as target,
            draft_service(llama, dtype="float32") as draft,
            decoder(target, draft, self_draft=True, max_num_speculative_tokens=5) as made,
        ):
            wanted = [
                request([7 + i, 8, 9], 440, gamma=1 + i % 5, temperature=0.0, stop_token_ids=()) for i in range(16)
            ]
            await answers(made, wanted)
            counters = made.counters
            assert counters.num_drafts >= 2_000
            assert counters.num_accepted_tokens == counters.num_tested_tokens
            assert counters.num_accepted_tokens >= 3_500

    async def test_a_rejection_does_not_spoil_the_rounds_after_it(self) -> None:
        """A draft that is right for k slots must get exactly k accepted in every round (field fault 64)."""
        for k in (0, 1, 2, 3):
            async with pair(f"stub:script?{SCRIPT}", f"stub:accept?k={k}&{SCRIPT}") as made:
                got = await answer(made, request([1], 120, gamma=4, temperature=0.0))
                histogram = got.stats.acceptance_histogram
                # The last rounds have less room than k.
                assert sum(histogram[:k]) <= 2
                assert histogram[k] >= 20
                assert len(histogram) == k + 1


TABLE = [
    [0.5, 0.3, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0],
    [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.3],
    [0.0, 0.0, 0.4, 0.3, 0.1, 0.1, 0.1, 0.0],
    [0.25, 0.0, 0.25, 0.0, 0.25, 0.0, 0.25, 0.0],
    [0.02, 0.08, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1],
    [0.3, 0.3, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05],
    [0.125] * 8,
    [0.6, 0.1, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05],
]
STREAMS = 50


class TestLaw:
    """The transitions of a Markov target's text are independent draws from its table.

    Measured by simulating the chain itself, the total variation over the 64 cells that a right sampler shows is
    .0072 +- .0011 with 50 streams of 2,000 tokens and .0162 +- .0022 with 50 of 400. The bounds lie four standard
    deviations above, so what a bias adds to that is seen from about .01 on in the long run, from .02 on in the short.
    """

    BOUNDS = {2_000: 0.012, 400: 0.025}  # noqa: RUF012

    @pytest.fixture
    def tables(self, tmp_path: Path) -> tuple[str, str]:
        target, draft = tmp_path / "p.json", tmp_path / "q.json"
        target.write_text(json.dumps(TABLE))
        q = np.roll(np.array(TABLE), 1, axis=1) * 0.5 + np.array(TABLE) * 0.5
        draft.write_text(json.dumps(q.tolist()))
        return str(target), str(draft)

    async def total_variation(self, tables: tuple[str, str], rule: Rule, length: int) -> float:
        """Between the transitions emitted over the running services and the table, weighted by where the text was."""
        async with pair(f"stub:markov?table={tables[0]}", f"stub:table?file={tables[1]}") as made:
            wanted = [
                request([seed % 8], length, gamma=3, seed=seed, rule=rule, stop_token_ids=()) for seed in range(STREAMS)
            ]
            got = await answers(made, wanted)
            assert made.counters.num_accepted_tokens > STREAMS * length / 4
            return transition_error(got)

    @pytest.mark.parametrize(("rule", "length"), [(Rule.STANDARD, 2_000), (Rule.COUPLED, 400)])
    async def test_emitted_law_is_the_targets(self, tables: tuple[str, str], rule: Rule, length: int) -> None:
        assert await self.total_variation(tables, rule, length) < self.BOUNDS[length]

    @pytest.mark.parametrize("error", ["accepts too often", "recovers from the wrong slot", "drops the bonus' row"])
    async def test_planted_errors_are_seen(
        self, tables: tuple[str, str], error: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A test of the law that nothing can fail proves nothing."""
        monkeypatch.setattr(
            "coordinator.decoding.accept",
            {
                "accepts too often": _accepts_too_often,
                "recovers from the wrong slot": _recovers_from_the_wrong_slot,
                "drops the bonus' row": _drops_the_bonus_row,
            }[error],
        )
        assert await self.total_variation(tables, Rule.STANDARD, 400) > self.BOUNDS[400]


def _accepts_too_often(rounds, states, batch):  # type: ignore[no-untyped-def]
    return acceptance.accept(rounds, states, replace(batch, p=batch.p * np.float32(1.3)))


def _recovers_from_the_wrong_slot(rounds, states, batch):  # type: ignore[no-untyped-def]
    return acceptance.accept(rounds, states, replace(batch, emit=np.roll(batch.emit, 1)))


def _drops_the_bonus_row(rounds, states, batch):  # type: ignore[no-untyped-def]
    """The bonus is taken for the recovered token of the first slot."""
    first = np.cumsum(batch.slots_done, dtype=np.int64) - batch.slots_done
    wrong = np.append(batch.emit, 0)[np.minimum(first, len(batch.emit))]
    return acceptance.accept(rounds, states, replace(batch, bonus=np.where(batch.slots_done, wrong, batch.bonus)))


def transition_error(got: list[Answer]) -> float:
    table, counts = np.array(TABLE), np.zeros((8, 8))
    for one in got:
        np.add.at(counts, (one.tokens[:-1], one.tokens[1:]), 1)
    n = counts.sum()
    return float(np.abs(counts / n - counts.sum(axis=1, keepdims=True) / n * table).sum() / 2)


class TestBadDrafts:
    @pytest.mark.parametrize(
        "kind", ["nan", "inf", "negative", "oov", "empty", "short", "late&ms=60", "stale", "dup", "wrong"]
    )
    async def test_text_stays_right_whatever_the_draft_answers(self, kind: str) -> None:
        """A draft must never cost more than speed (field faults 53, 71)."""
        draft = f"stub:wrong?{SCRIPT}" if kind == "wrong" else f"stub:bad?kind={kind}&after=3&{SCRIPT}"
        async with pair(f"stub:script?{SCRIPT}", draft) as made:
            expected = TOKENS[:100]
            got = await answers(made, [request([1 + i], 100, gamma=4, temperature=0.0) for i in range(4)])
            assert [one.tokens for one in got] == [expected] * 4
            assert made.counters.num_drafts > 0 or kind in ("empty", "stale")
            if kind in ("nan", "inf", "negative"):
                assert made.state.degraded[0].part == "draft"

    async def test_draft_that_comes_back_is_used_again(self) -> None:
        """It dies in mid-run and is restarted: nothing but speed is lost, and it is back within 5 s."""
        async with target_service(f"stub:script?{SCRIPT}&fixed_ms=20") as target:
            async with draft_service(f"stub:perfect?{SCRIPT}") as draft:
                made = Decoder(config(target, draft))
                await made.start()
                await until(lambda: made.state.draft is not None)
                running = asyncio.create_task(answer(made, request([1], 200, gamma=1, temperature=0.0)))
                await until(lambda: made.counters.num_drafts >= 5)
            await until(lambda: made.state.draft is None)
            assert made.state.degraded[0].part == "draft"
            plain = made.counters.gamma[0]
            await until(lambda: made.counters.gamma[0] > plain + 5)
            before = made.counters.num_drafts
            async with draft_service(f"stub:perfect?{SCRIPT}", port=draft):
                await until(lambda: made.counters.num_drafts > before + 5)
                assert (await running).tokens == TOKENS
                assert made.state.degraded == []
                await made.close()


class TestTargetFailure:
    @pytest.mark.parametrize("gamma", [0, 3])
    async def test_streams_go_on_after_a_restart_of_the_target(self, gamma: int) -> None:
        """No token twice, none lost, no false end (field fault 108)."""
        async with draft_service(f"stub:perfect?{SCRIPT}") as draft:
            async with target_service(f"stub:script?{SCRIPT}&fixed_ms=20") as target:
                made = Decoder(config(target, draft))
                await made.start()
                await until(lambda: made.state.draft is not None)
                running = asyncio.create_task(
                    answers(made, [request([1 + i], 200, gamma=gamma, temperature=0.0) for i in range(3)])
                )
                await until(lambda: made.counters.generated_tokens >= 60)
            await until(lambda: made.state.target is None)
            assert not running.done()
            async with target_service(f"stub:script?{SCRIPT}&fixed_ms=20", port=target):
                assert [one.tokens for one in await running] == [TOKENS] * 3
                assert made.counters.reopened == 3
                await made.close()

    async def test_another_replica_takes_over(self) -> None:
        """The same law on both: the text at temperature 1 is that of an undisturbed run, noise and all."""
        async with pair("stub:markov", "stub:perfect") as made:
            wanted = [request([65 + i], 150, gamma=3, seed=i, rule=Rule.COUPLED) for i in range(4)]
            undisturbed = [one.tokens for one in await answers(made, wanted)]
        async with target_service("stub:markov?fixed_ms=10") as first, draft_service("stub:perfect") as draft:
            async with target_service("stub:markov?fixed_ms=10") as second:
                made = Decoder(config((first, second), draft))
                await made.start()
                await until(lambda: made.state.targets_up == 2 and made.state.draft is not None)
                running = asyncio.create_task(answers(made, wanted))
                await until(lambda: made.counters.generated_tokens >= 80)
            assert [one.tokens for one in await running] == undisturbed
            await made.close()
