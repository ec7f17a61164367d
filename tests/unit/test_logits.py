"""Logits to p, against a slow oracle; ties, edges, faults, and independence of the rows beside."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from outrider.engine import filters
from outrider.engine import logits as processing
from outrider.engine.filters import Filters, cut
from outrider.engine.logits import RowContext, greedy, process
from outrider.engine.top import argmax, at_least, largest
from outrider.engine.transfer import read
from outrider.errors import InvalidArgument, NonFiniteLogits
from outrider.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [1, 2, 2]
TEXT = [3, 3, 4]


def row(params: SamplingParams, tokens: list[int] | None = None, prompt_len: int = len(PROMPT)) -> RowContext:
    tokens = PROMPT + TEXT if tokens is None else tokens
    return RowContext(params, tokens, len(tokens), prompt_len)


def oracle(logits: np.ndarray, context: RowContext) -> np.ndarray:
    """p in float64, one id at a time, by sorting; straight from the definitions of the parameters."""
    params, tokens = context.params, list(context.tokens[: context.length])
    text = tokens[context.prompt_len :]
    z = logits.astype(np.float64)
    if params.allowed_token_ids:
        z[sorted(set(range(len(z))) - set(params.allowed_token_ids))] = -math.inf
    for token, bias in params.logit_bias:
        if token < len(z):
            z[token] += bias
    for word in params.bad_words:
        if tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1] and word[-1] < len(z):
            z[word[-1]] = -math.inf
    if len(text) < params.min_tokens:
        z[[token for token in params.stop_token_ids if token < len(z)]] = -math.inf
    for token in set(tokens):
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in set(text):
        z[token] -= params.presence_penalty + params.frequency_penalty * text.count(token)
    if params.greedy:
        return (np.arange(len(z)) == np.argmax(z)).astype(np.float64)
    z /= params.temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    if params.top_k > 0:
        p[np.argsort(-p, kind="stable")[params.top_k :]] = 0
    order = np.argsort(-p, kind="stable")
    running = np.cumsum(p[order])
    if params.top_p < 1:
        p[order[int((running < params.top_p * p.sum() - 1e-6).sum()) + 1 :]] = 0
    return p / p.sum()


def random_params(coins: random.Random, vocab: int) -> SamplingParams:
    def some(value, default):
        return value if coins.random() < 0.4 else default

    return SamplingParams(
        temperature=coins.choice([0.0, 0.5, 1.0, 1.0, 2.0]),
        top_k=some(coins.choice([1, 2, 7, 70, vocab - 1, vocab, vocab + 1, -1]), 0),
        top_p=some(coins.choice([1e-9, 0.3, 0.7, 0.9, 0.99]), 1.0),
        min_p=some(coins.choice([0.001, 0.1, 0.7, 1.0]), 0.0),
        presence_penalty=some(0.75, 0.0),
        frequency_penalty=some(-0.5, 0.0),
        repetition_penalty=some(1.25, 1.0),
        logit_bias=some(((2, 1.5), (3, -100.0), (vocab + 5, 9.0)), ()),
        allowed_token_ids=some(tuple(range(0, vocab, 2)), ()),
        bad_words=some(((1,), (2, 4), (1, 2, 3), (3, vocab + 2)), ()),
        min_tokens=some(coins.choice([3, 4]), 0),
        stop_token_ids=(0, 4, vocab + 1),
        max_tokens=16,
    )


@pytest.mark.parametrize("vocab", [5, 64, 100, 4100])
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_p_equals_the_oracle_for_any_mix_of_parameters(vocab: int, spread: float):
    """Guards the order and meaning of every parameter, in batches where each row has parameters of its own.

    Logits on a coarse grid, so that ties are common and rounding cannot decide.
    """
    coins = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn((60, vocab), generator=generator) * spread).mul(4).round().div(4)
    rows = [row(random_params(coins, vocab)) for _ in range(len(logits))]
    p, faults = process(logits, rows)
    assert not faults
    expected = np.stack([oracle(logits[i].numpy(), rows[i]) for i in range(len(rows))])
    lost_or_gained = (p.numpy() > 0) != (expected > 0)
    assert np.maximum(p.numpy(), expected)[lost_or_gained].max(initial=0) < np.finfo(np.float32).tiny
    np.testing.assert_allclose(p.numpy(), expected, rtol=3e-5, atol=1e-9)


def test_a_row_has_the_same_bits_alone_and_in_any_batch():
    """Guards against p that depends on the rows beside it: equal text would need equal neighbours."""
    torch.set_num_threads(2)
    coins = random.Random(1)
    logits = torch.randn((12, 40_000), generator=torch.Generator().manual_seed(1)) * 2
    rows = [row(random_params(coins, 40_000)) for _ in range(12)]
    together = process(logits, rows).p
    for i in range(12):
        assert torch.equal(process(logits[i : i + 1], rows[i : i + 1]).p[0], together[i])


def test_the_logits_are_left_as_they_were():
    """Guards log-probabilities, which are taken from the raw logits."""
    logits = torch.randn((3, 50))
    before = logits.clone()
    process(logits, [row(SamplingParams(presence_penalty=1.0)), row(SamplingParams()), row(SamplingParams(top_k=3))])
    greedy(logits, [row(SamplingParams(logit_bias=((1, 5.0),)))] * 3)
    assert torch.equal(logits, before)


def test_greedy_rows_take_the_lowest_of_equal_ids_whatever_rides_beside():
    """Guards against greedy by a tiny temperature, and against temperature 0 with top_p entering sampling."""
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, top_p=0.9),
        SamplingParams(top_k=1),
        SamplingParams(temperature=1e-5),
        SamplingParams(top_p=1e-9),
        SamplingParams(),
    ]
    p = process(torch.tensor([[1.0, 1.0, 0.0]] * len(kinds)), [row(kind, [0], 1) for kind in kinds]).p
    assert p[:5].tolist() == [[1, 0, 0]] * 5
    assert p[5, 0] == p[5, 1] > p[5, 2] > 0


@pytest.mark.parametrize("vocab", [3, 31, 33, 1000, 4097])
def test_greedy_equals_the_argmax_of_process(vocab: int):
    """Guards the short cut that greedy streams take."""
    logits = torch.randn((20, vocab), generator=torch.Generator().manual_seed(vocab)).mul(2).round()
    rows = [row(SamplingParams(temperature=0, frequency_penalty=0.5 * (i % 2)), [0, 1, 2], 1) for i in range(20)]
    assert greedy(logits, rows).ids.tolist() == process(logits, rows).p.argmax(dim=1).tolist()


@pytest.mark.parametrize("temperature", [1e-8, 1e-5, 1e-3])
def test_tiny_temperatures_do_not_overflow(temperature: float):
    """Guards against NaN at T = 1e-5 on logits of size 50."""
    logits = torch.tensor([[50.0, -50.0, 49.0]])
    p, faults = process(logits, [row(SamplingParams(temperature=temperature), [0], 1)])
    assert not faults and p.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("vocab", [100, 40_000])
def test_min_p_is_not_off_for_large_vocabularies(vocab: int):
    """Guards against a fast path that declines a large V and a fall-back without the filter."""
    p = torch.full((vocab,), 1e-9)
    p[7], p[vocab - 3] = 0.6, 0.4
    found = process(p.log()[None], [row(SamplingParams(min_p=0.5), [0], 1)]).p[0]
    assert found.nonzero().flatten().tolist() == [7, vocab - 3]


def test_top_p_counts_probabilities_as_written():
    """Guards against .9 in float32, which is below 0.9, keeping one id too many."""
    p = torch.tensor([[0.1 / 9] * 9 + [0.9]])
    assert process(p.log(), [row(SamplingParams(top_p=0.9), [0], 1)]).p[0].nonzero().flatten().tolist() == [9]
    even = process(torch.zeros((1, 10)), [row(SamplingParams(top_p=0.3), [0], 1)]).p
    assert even[0].nonzero().flatten().tolist() == [0, 1, 2]


def test_filters_apply_before_q_and_p_are_compared():
    """The worked number: top_k = 2 of [.5, .3, .2] is [.625, .375, 0]."""
    p = process(torch.tensor([[0.5, 0.3, 0.2]]).log(), [row(SamplingParams(top_k=2), [0], 1)]).p
    np.testing.assert_allclose(p.numpy(), [[0.625, 0.375, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("settings", [Filters(top_p=0.9), Filters(top_k=300), Filters(0.001, 100, 0.8), Filters(0.01)])
def test_both_ways_to_cut_agree(settings: Filters, monkeypatch: pytest.MonkeyPatch):
    """Guards against a law that depends on whether 64 ids were enough."""
    logits = torch.randn((40, 3000), generator=torch.Generator().manual_seed(3)) * torch.linspace(0.1, 9, 40)[:, None]
    p = torch.softmax(logits, dim=-1)
    expected = cut(p, settings)
    monkeypatch.setattr(filters, "_TOP", 1)
    found = cut(p, settings)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_penalties_count_up_to_each_verify_row():
    """Worked example: logits a = 1.0, b = .9, frequency penalty .5, greedy: a, b, a, b, ... row by row."""
    logits = torch.tensor([[1.0, 0.9, -9.0]] * 5)
    tokens = [2, 0, 1, 0, 1]
    params = SamplingParams(temperature=0, frequency_penalty=0.5)
    rows = [RowContext(params, tokens, length, prompt_len=1) for length in range(1, 6)]
    assert greedy(logits, rows).ids.tolist() == [0, 1, 0, 1, 0]
    plain = [context._replace(params=SamplingParams(temperature=0)) for context in rows]
    assert greedy(logits, plain).ids.tolist() == [0] * 5


def test_a_bad_word_is_not_completed_at_any_verify_row():
    """Worked example: 0 0 1 and 2 2 are banned; rows see the drafted tokens before them, and the prompt."""
    logits = torch.tensor([[1.0, 5.0, 4.0]] * 5)
    params = SamplingParams(temperature=0, bad_words=((0, 0, 1), (2, 2)))
    rows = [RowContext(params, [0, 0, 0, 2, 1], length, prompt_len=1) for length in range(1, 6)]
    assert greedy(logits, rows).ids.tolist() == [1, 2, 2, 1, 1]
    first = RowContext(SamplingParams(temperature=0, bad_words=((1,),)), [0], 1, prompt_len=1)
    assert greedy(logits[:1], [first]).ids.tolist() == [2]


def test_min_tokens_holds_stops_back_row_by_row():
    """Guards against an off-by-one on drafted rows: with min_tokens = 2 the third generated token may be a stop."""
    logits = torch.tensor([[5.0, 1.0, 0.0]] * 4)
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(0,))
    rows = [RowContext(params, [1, 1, 1, 1], length, prompt_len=1) for length in range(1, 5)]
    assert greedy(logits, rows).ids.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5, top_k=2)]
)
def test_a_broken_row_is_a_fault_of_its_own_stream(params: SamplingParams):
    """Guards against NaN slipping through, and against one stream's NaN failing its neighbours."""
    good = [0.0, 1.0, -math.inf, 2.0]
    bad = [
        [0.0, math.nan, 1.0, 2.0],
        [math.nan] * 4,
        [0.0, math.inf, 1.0, 2.0],
        [-math.inf] * 4,
    ]
    logits = torch.tensor([good, *bad, good])
    p, faults = process(logits, [row(params, [0], 1)] * 6)
    assert sorted(faults) == [1, 2, 3, 4]
    assert all(isinstance(fault, NonFiniteLogits) for fault in faults.values())
    assert torch.equal(p[0], p[5]) and p[0].sum() == pytest.approx(1) and p[0, 2] == 0
    assert not p[1:5].any()
    assert sorted(greedy(logits, [row(params, [0], 1)] * 6).faults) == [1, 2, 3, 4]


def test_masks_that_leave_nothing_are_the_requests_fault():
    """Guards against blaming the model for allowed ids that are all held back."""
    params = SamplingParams(allowed_token_ids=(1,), stop_token_ids=(1,), min_tokens=4)
    _, faults = process(torch.zeros((1, 3)), [row(params, [0], 1)])
    assert isinstance(faults[0], InvalidArgument)


def test_no_rows_are_no_error():
    """Guards steps that only prefill."""
    assert process(torch.empty((0, 9)), []).p.shape == (0, 9)
    assert greedy(torch.empty((0, 9)), []).ids.shape == (0,)


@pytest.mark.parametrize("width", [3, 31, 32, 33, 200, 4097])
def test_searches_by_blocks_equal_plain_ones(width: int):
    """Guards the end of a row whose width is no multiple of the block, with ties everywhere."""
    rows = torch.randn((7, width), generator=torch.Generator().manual_seed(width)).round(decimals=1)
    found, best = argmax(rows), rows.max(dim=1, keepdim=True)
    assert torch.equal(found.ids, best.indices) and torch.equal(found.values, best.values)
    top = largest(rows, min(3, width))
    assert torch.equal(top.values, rows.topk(min(3, width), dim=1).values)
    assert torch.equal(rows.gather(1, top.ids), top.values)
    assert all(len(set(ids)) == len(ids) for ids in top.ids.tolist())
    row_ids, ids = at_least(rows, torch.full((7, 1), 0.5))
    assert torch.equal(torch.stack((row_ids, ids), dim=1), (rows >= 0.5).nonzero())


def test_faults_are_looked_for_when_somebody_asks(monkeypatch: pytest.MonkeyPatch):
    """Guards the one wait of a step on a GPU: p can be drawn from before anybody knows which rows are distributions."""
    reads = []
    monkeypatch.setattr(processing, "read", lambda *tensors: reads.append(1) or read(*tensors))
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [3.0, 1.0]])
    kinds = [SamplingParams(), SamplingParams(), SamplingParams(temperature=0.5)]
    found = processing.process(logits, [row(kind, [0], 1) for kind in kinds])
    assert not found.p[1].any() and not reads
    assert list(found.faults) == [1] and len(found.faults) == 1 and 0 not in found.faults
    assert reads == [1]
