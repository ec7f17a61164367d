"""The law of a round, by enumeration of the target's production functions on a grid of emit words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.distribution import TOTAL
from outrider.sampling import SamplingParams
from outrider.seam import Slots, StreamOpen
from target_service import scoring
from target_service.proposal import read_proposals
from target_service.round import Round, Verdict
from target_service.scoring import judge

GRID = 840
"""Every threshold below is a multiple of 1/8 divided by at most 8/8, so it lies on a multiple of 1/840."""

P = np.array([[4, 3, 1], [1, 2, 5], [3, 3, 2]]) / 8
Q = np.array([[2, 4, 2], [3, 4, 1], [8, 0, 0]]) / 8
"""Laws of the token after each of three; the last q is one-hot."""

LAST = 0
"""The last committed token."""

Law = dict[tuple[int, ...], float]
Edit = Callable[[Slots, tuple[int, ...]], None]


def slots_of(x: tuple[int, ...]) -> Slots:
    """x drafted from Q, with the q of each slot in counts."""
    rows = [Q[previous] for previous in (LAST, *x)[: len(x)]]
    supports = [np.flatnonzero(row) if (row < 1).all() else np.empty(0, np.int64) for row in rows]
    own = [row[token] * TOTAL - 1 for row, token in zip(rows, x, strict=True)]
    return Slots(
        per_item=np.array([len(x)], np.uint8),
        draft_ids=np.array(x, np.uint32),
        own_counts=np.array(own, np.uint16),
        support_sizes=np.array([len(support) for support in supports], np.uint16),
        q_ids=np.concatenate([np.empty(0, np.int64), *supports]).astype(np.uint32),
        q_counts=np.concatenate(
            [np.empty(0), *(row[support] * TOTAL - 1 for row, support in zip(rows, supports, strict=True))]
        ).astype(np.uint16),
        dense_q=np.empty(0, np.float32),
    )


def verdicts(
    x: tuple[int, ...],
    edit: Edit | None = None,
    shift: int = 0,
    params: SamplingParams | None = None,
    grid: int = GRID,
) -> list[Verdict]:
    """One verdict per emit word; `shift` plants rows off by that many."""
    slots = slots_of(x)
    if edit is not None:
        edit(slots, x)
    (proposal,) = read_proposals(slots, [False], 3)
    opened = StreamOpen(stream_id=1, prompt_length=1, params=params or SamplingParams())
    a_round = Round(opened, [LAST, *proposal.x], 1, proposal)
    contexts = [LAST, *proposal.x]
    contexts = contexts[shift:] + contexts[:shift]
    logits = torch.from_numpy(np.log(np.tile(P[contexts], (grid, 1)))).float()
    found = judge(logits, [a_round] * grid)
    assert all(isinstance(verdict, Verdict) for verdict in found)
    return [verdict for verdict in found if isinstance(verdict, Verdict)]


def law(gamma: int, *, edit: Edit | None = None, shift: int = 0) -> Law:
    """The law of the first gamma + 1 tokens: a round, then plain decoding up to that length."""
    emitted: Law = defaultdict(float)
    for x in product(range(3), repeat=gamma):
        chance = np.prod([Q[previous, token] for previous, token in zip((LAST, *x), x, strict=False)])
        if chance == 0:
            continue
        for verdict in verdicts(x, edit, shift):
            reach = float(chance) / GRID
            for slot, (p, token) in enumerate(zip(verdict.p.tolist(), verdict.emit.tolist(), strict=True)):
                accept = min(1.0, p / Q[(LAST, *x)[slot], x[slot]])
                emitted[(*x[:slot], token)] += reach * (1 - accept)
                reach *= accept
            emitted[(*x[: len(verdict.emit)], verdict.bonus)] += reach
    whole: Law = defaultdict(float)
    for tokens, chance in emitted.items():
        for rest in product(range(3), repeat=gamma + 1 - len(tokens)):
            whole[tokens + rest] += chance * _plain(tokens[-1], rest)
    return whole


def distance(found: Law, gamma: int) -> float:
    """Total variation from plain decoding."""
    return 0.5 * sum(abs(found.get(text, 0.0) - _plain(LAST, text)) for text in product(range(3), repeat=gamma + 1))


def _plain(previous: int, tokens: tuple[int, ...]) -> float:
    return float(np.prod([P[a, b] for a, b in zip((previous, *tokens), tokens, strict=False)]))


@pytest.fixture(autouse=True)
def emit_words_on_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round i of a call draws with the i-th grid point."""

    def grid(rounds: list[Round]) -> NDArray[np.float64]:
        return (np.arange(len(rounds)) + 0.5) / len(rounds)

    monkeypatch.setattr(scoring, "emit_uniforms", grid)


@pytest.mark.parametrize("gamma", [0, 1, 2, 3])
def test_a_round_has_the_law_of_plain_decoding(gamma: int) -> None:
    """Guards the rule's target half: p at the drafted ids, recovered candidates and the bonus, with mixed q."""
    assert distance(law(gamma), gamma) < 1e-6


def test_a_cut_decided_by_q_alone_is_exact() -> None:
    """Guards against dropping a whole proposal: the second q is broken only behind x_1 = 1."""

    def break_second(slots: Slots, x: tuple[int, ...]) -> None:
        if x[0] == 1:
            slots.q_counts[-1] ^= 1

    assert distance(law(2, edit=break_second), 2) < 1e-6


def test_rows_off_by_one_are_seen() -> None:
    """A planted error."""
    assert distance(law(2, shift=1), 2) > 0.05


@pytest.mark.parametrize(
    "planted",
    [
        lambda p, rows, ids, q: p,
        lambda p, rows, ids, q: torch.softmax(_residual(p, rows, ids, q), dim=1),
        lambda p, rows, ids, q: _residual(p, rows, ids, np.minimum(q, 0.25)),
    ],
    ids=["p for the residual", "softmax on the residual", "another q than the declared one"],
)
def test_a_wrong_residual_is_seen(monkeypatch: pytest.MonkeyPatch, planted: Callable[..., torch.Tensor]) -> None:
    """Planted errors."""
    monkeypatch.setattr(scoring, "residual", planted)
    assert distance(law(2), 2) > 0.01


_residual = scoring.residual
