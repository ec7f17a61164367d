"""Under the standard rule every sampling parameter has the law of plain decoding, at drafted positions too.

A round is enumerated over all proposals and a grid of emit words, with the target's production functions, and compared
with a plain law that is written down anew below. The draft knows nothing of the parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.edits import RowContext
from outrider.engine.logits import Processed, process
from outrider.sampling import SamplingParams
from target_service import scoring
from tests.unit.test_verifier_law import LAST, P, Q, emit_words_on_a_grid, verdicts

__all__ = ["emit_words_on_a_grid"]  # a fixture that is used by itself

GAMMA = 2
GRID = 168
TOLERANCE = 2 / GRID
"""Thresholds lie anywhere between two points of the grid, and not all of them on the same side."""

Row = NDArray[np.float64]

PARAMETERS: dict[str, SamplingParams] = {
    "temperature": SamplingParams(temperature=0.5),
    "top_k": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.6),
    "min_p": SamplingParams(min_p=0.5),
    "presence_penalty": SamplingParams(presence_penalty=1.5),
    "frequency_penalty": SamplingParams(frequency_penalty=1.0),
    "repetition_penalty": SamplingParams(repetition_penalty=2.0),
    "logit_bias": SamplingParams(logit_bias=((1, 1.0),)),
    "allowed_token_ids": SamplingParams(allowed_token_ids=(0, 2)),
    "min_tokens": SamplingParams(min_tokens=2, stop_token_ids=(1,)),
    "bad_words": SamplingParams(bad_words=((0, 1), (2, 2, 0))),
    "several": SamplingParams(temperature=1.5, top_k=2, presence_penalty=0.5, logit_bias=((2, -0.5),)),
}


@pytest.fixture(autouse=True)
def rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds of a call differ in their emit words only, so that the rows of one stand for those of all."""
    spoil_rows(monkeypatch, lambda row, first: row)


def spoil_rows(monkeypatch: pytest.MonkeyPatch, spoilt: Callable[[RowContext, bool], RowContext]) -> None:
    """Has p computed of rows that `spoilt` changed; its second argument says whether a row is its round's first."""

    def process_once(logits: Tensor, rows: list[RowContext]) -> Processed:
        own = [spoilt(row, row.length == row.prompt_len) for row in rows[: len(rows) // GRID]]
        p, faults = process(logits[: len(own)], own)
        assert not faults
        return Processed(p.repeat(GRID, 1), {})

    monkeypatch.setattr(scoring, "process", process_once)


def plain_row(tokens: tuple[int, ...], params: SamplingParams) -> Row:
    """What plain decoding draws from behind these tokens, of which the first is the prompt."""
    generated, logits = tokens[1:], np.log(P[tokens[-1]])
    for token in range(3):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            logits[token] = -np.inf
        logits[token] += dict(params.logit_bias).get(token, 0.0)
        if any((*tokens, token)[-len(word) :] == word for word in params.bad_words):
            logits[token] = -np.inf
        if token in params.stop_token_ids and len(generated) < params.min_tokens:
            logits[token] = -np.inf
        if token in tokens:
            logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
        logits[token] -= params.presence_penalty * (token in generated)
        logits[token] -= params.frequency_penalty * generated.count(token)
    p = np.exp(logits / params.temperature)
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p - 1e-12]] = 0
    return np.asarray(p / p.sum())


def plain(tokens: tuple[int, ...], params: SamplingParams) -> float:
    """Probability of a text behind the prompt; one that has ended goes on by itself, as `law` lets it."""
    return float(np.prod([plain_row((LAST, *tokens[:i]), params)[token] for i, token in enumerate(tokens)]))


def law(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The law of the first GAMMA + 1 tokens: a round, then plain decoding up to that length."""
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    for x in product(range(3), repeat=GAMMA):
        context = (LAST, *x)
        chance = float(np.prod([Q[previous, token] for previous, token in zip(context, x, strict=False)]))
        for verdict in verdicts(x, params=params, grid=GRID) if chance else []:
            reach = chance / GRID
            for slot, (p, token) in enumerate(zip(verdict.p.tolist(), verdict.emit.tolist(), strict=True)):
                accept = min(1.0, p / Q[context[slot], x[slot]])
                emitted[(*x[:slot], token)] += reach * (1 - accept)
                reach *= accept
            emitted[(*x, verdict.bonus)] += reach
    whole: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, chance in emitted.items():
        for rest in product(range(3), repeat=GAMMA + 1 - len(tokens)):
            text = (*tokens, *rest)
            rows = [plain_row((LAST, *text[:i]), params)[text[i]] for i in range(len(tokens), len(text))]
            whole[text] += chance * float(np.prod(rows))
    return whole


def distance(params: SamplingParams) -> float:
    """Total variation from plain decoding."""
    found = law(params)
    return 0.5 * sum(abs(found[text] - plain(text, params)) for text in product(range(3), repeat=GAMMA + 1))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_round_has_the_law_of_plain_decoding(name: str) -> None:
    """Guards each parameter at every slot, recovered and bonus tokens included."""
    params = PARAMETERS[name]
    nothing = SamplingParams()
    change = 0.5 * sum(abs(plain(t, params) - plain(t, nothing)) for t in product(range(3), repeat=GAMMA + 1))
    assert change > 5 * TOLERANCE, "the parameter changes too little for its loss to be seen"
    assert distance(params) < TOLERANCE


def test_every_parameter_of_the_sampler_has_a_law() -> None:
    """Guards against a parameter that comes later. Greedy, length and structure have equality tests instead."""
    fields = set(SamplingParams.__dataclass_fields__) - {"max_tokens", "stop_token_ids", "grammar"}
    assert fields == PARAMETERS.keys() - {"several"}


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        # A parameter that acts on the first row of a round only, as in engines that edit one row per stream.
        ("top_k", lambda row, first: row if first else row._replace(params=replace(row.params, top_k=0))),
        ("min_p", lambda row, first: row if first else row._replace(params=replace(row.params, min_p=0.0))),
        # Counts that stop at the committed tokens, or reach one too far.
        ("frequency_penalty", lambda row, first: row._replace(length=1)),
        ("presence_penalty", lambda row, first: row._replace(length=min(row.length + 1, len(row.tokens)))),
        ("bad_words", lambda row, first: row._replace(length=1)),
        ("min_tokens", lambda row, first: row._replace(length=row.length + 1)),
    ],
)
def test_a_parameter_that_is_lost_at_drafted_positions_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, planted: Callable[[RowContext, bool], RowContext]
) -> None:
    """Planted errors."""
    spoil_rows(monkeypatch, planted)
    assert distance(PARAMETERS[name]) > 3 * TOLERANCE
