"""Log-probabilities from the verifier: the model's own, whatever the step they were computed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.engine.config import EngineConfig
from outrider.engine.model import LoadedModel, load_model
from outrider.engine.stub import parse
from outrider.engine.stub_model import load_stub
from outrider.logprobs import LogprobRows
from outrider.sampling import SamplingParams
from outrider.seam import VerifyBatch
from target_service.logprobs import RawRows, Wanted
from tests.unit.target_driver import Draft, Stream, Target, plain, verify
from tests.unit.tiny import tiny_llama

VOCAB = 64
PARAMS = SamplingParams(max_tokens=10_000, temperature=0.7, frequency_penalty=1.0, logit_bias=((3, 9.0),), top_k=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    folder: Path = tiny_llama(tmp_path_factory.mktemp("tiny"), vocab=VOCAB)
    loaded = load_model(EngineConfig(model=str(folder), dtype="float32", kv_cache_tokens=4096, threads=1))
    loaded.allocate_kv(loaded.num_blocks)
    return loaded


def reference(model: LoadedModel, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Log-softmax of a fresh pass over all tokens."""
    target = Target(model)
    stream = Stream(900 + len(tokens), [*tokens], SamplingParams(max_tokens=1))
    target.send(plain([stream], 1))
    plan: Any = target.verifier.plan()
    span = plan.spans[0]._replace(wanted=len(tokens))
    with torch.inference_mode():
        return torch.log_softmax(model.forward([span]), -1).numpy()


def asking(batch: VerifyBatch, *, logprobs: int | None = None, prompt_logprobs: int | None = None) -> VerifyBatch:
    opens = tuple(replace(one, logprobs=logprobs, prompt_logprobs=prompt_logprobs) for one in batch.opens)
    return replace(batch, opens=opens)


class Scores(NamedTuple):
    rounds: dict[tuple[int, int], LogprobRows]
    prompts: dict[tuple[int, int], LogprobRows]


def settle(target: Target) -> Scores:
    rounds: dict[tuple[int, int], LogprobRows] = {}
    prompts: dict[tuple[int, int], LogprobRows] = {}
    while target.step():
        pass
    for batch in target.link.batches:
        rounds |= batch.logprobs.by_answer()
        prompts |= batch.prompt_logprobs.by_answer()
    return Scores(rounds, prompts)


def check(rows: LogprobRows, law: NDArray[np.float32], tokens: Sequence[int], k: int) -> None:
    """One value per token and one row of tops per row of the law."""
    assert rows.own == pytest.approx(np.array([law[i, t] for i, t in enumerate(tokens)]), abs=1e-5)
    for row, ids, values in zip(law, rows.top_ids, rows.top, strict=True):
        assert ids.tolist() == np.argsort(-row, kind="stable")[:k].tolist()
        assert values == pytest.approx(row[ids], abs=1e-5)


@pytest.mark.parametrize("budget", [8, 512])
def test_a_prompt_is_scored_whatever_pieces_it_is_read_in(model: LoadedModel, budget: int) -> None:
    """Guards the row of every prompt token against the pieces of chunked prefill, beside another stream's."""
    prompt = [int(token) for token in np.random.default_rng(0).integers(1, VOCAB, 50)]
    target = Target(model, max_num_batched_tokens=budget)
    streams = [Stream(1, prompt, PARAMS), Stream(2, prompt[::-1], PARAMS)]
    target.send(asking(plain(streams[:1], 1), prompt_logprobs=3))
    target.send(plain(streams[1:], 1))
    scores = settle(target)
    assert list(scores.prompts) == [(1, 50)] and not scores.rounds
    check(scores.prompts[1, 50], reference(model, prompt)[:-1], prompt[1:], 3)
    assert len(target.steps) >= 50 // budget


def test_each_slot_has_the_value_of_what_it_may_emit(model: LoadedModel) -> None:
    """Guards drafted, recovered and bonus tokens of a round against each other's rows."""
    prompt, x = [5, 9, 33, 2], [7, 7, 40]
    target = Target(model)
    stream = Stream(1, prompt, PARAMS, seed=3)
    target.send(asking(verify([(stream, Draft(x))]), logprobs=4))
    while target.step():
        pass
    (batch,) = target.link.batches
    (rows,) = batch.logprobs.by_answer().values()
    law = reference(model, [*prompt, *x])[len(prompt) - 1 :]
    emit = [*batch.emit.tolist(), int(batch.bonus[0])]
    check(rows._replace(own=rows.own[len(x) :]), law, emit, 4)
    assert rows.own[: len(x)] == pytest.approx([law[i, token] for i, token in enumerate(x)], abs=1e-5)


def test_a_run_has_a_block_per_token(model: LoadedModel) -> None:
    """Guards the echo that tells the answers of a run apart."""
    target = Target(model)
    stream = Stream(1, [5, 9], PARAMS, seed=3)
    target.send(asking(plain([stream], 3), logprobs=2))
    while target.step():
        pass
    tokens = [int(token) for batch in target.link.batches for token in batch.bonus]
    scores = settle(target)
    assert list(scores.rounds) == [(1, 2), (1, 3), (1, 4)]
    law = reference(model, [5, 9, *tokens])
    for index, token in enumerate(tokens):
        check(scores.rounds[1, 2 + index], law[1 + index : 2 + index], [token], 2)


def test_the_same_item_again_brings_the_prompt_again(model: LoadedModel) -> None:
    """Guards a prompt's values against a link that is lost before they arrive, and against being kept for ever."""
    prompt = [5, 9, 33, 2, 8]
    target = Target(model)
    stream = Stream(1, prompt, PARAMS)
    target.send(asking(plain([stream], 1), prompt_logprobs=1))
    first = settle(target).prompts[1, 5]
    target.link.batches.clear()
    stream.generation += 1
    target.send(plain([stream], 1))
    again = settle(target).prompts[1, 5]
    assert np.array_equal(first.own, again.own) and np.array_equal(first.top_ids, again.top_ids)
    target.link.batches.clear()
    stream.tokens.append(3)
    target.send(plain([stream], 1))
    assert not settle(target).prompts


def test_a_prompt_that_was_read_without_being_looked_at_is_read_again(model: LoadedModel) -> None:
    """Guards against gaps: the stream is opened again, now with values wanted, while its KV is still there."""
    prompt = [5, 9, 33, 2, 8]
    target = Target(model, max_num_batched_tokens=2)
    stream = Stream(1, prompt, PARAMS)
    target.send(asking(plain([stream], 1), prompt_logprobs=0))
    target.step()  # two of five tokens
    target.verifier.streams.get(1).cached = 4  # type: ignore[union-attr]
    stream.generation += 1
    target.send(plain([stream], 1))
    check(settle(target).prompts[1, 5], reference(model, prompt)[:-1], prompt[1:], 0)


def test_padding_counts_as_the_model_counts_it_and_is_never_an_alternative() -> None:
    """Guards values against renormalising, and tops against ids that no tokenizer has a text for."""
    stub = load_stub(parse("stub:markov"))
    target = Target(stub, drawable=110)
    stream = Stream(1, [105], SamplingParams(max_tokens=100, temperature=0.0))
    target.send(asking(plain([stream], 6), logprobs=20))
    rounds = settle(target).rounds
    assert all(rows.top_ids.max() < 110 for rows in rounds.values())
    assert rounds[1, 1].own == pytest.approx([np.log(0.9)], abs=1e-5)


def test_equal_values_go_to_the_lowest_ids() -> None:
    """Guards alternatives in half precision, where ties are common, against the order in which a kernel finds them."""
    logits = torch.zeros(3, 5000)
    logits[1, 4000:] = 1.0
    logits[2] = -torch.arange(5000) / 2500
    (rows,) = RawRows(logits, [0, 1, 2]).take([Wanted([0], [7], [0, 1, 2], 3)])
    assert rows.top_ids.tolist() == [[0, 1, 2], [4000, 4001, 4002], [0, 1, 2]]
