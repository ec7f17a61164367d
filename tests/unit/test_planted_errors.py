"""The oracle bites: each error known from public engines, planted into an otherwise exact round, is caught.

`play` is one round with a hook at each place where engines went wrong. Without hooks it is exact; with one wrong hook
its enumerated law differs from p, in the worked examples by the very numbers that were seen in the field.
"""

from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.rule import dense_round, inverse_cdf, residual
from tests.unit.enumeration import Law, World, bias

Row = NDArray[np.float64]

PAIR_A = World(np.tile([0.5, 0.3, 0.2], (3, 1)), np.tile([0.2, 0.5, 0.3], (3, 1)))
"""p = [.5, .3, .2] and q = [.2, .5, .3] whatever came before: accept rate .7, residual [1, 0, 0]."""

QUARTERS = World(
    p=np.array([[0.5, 0.0, 0.5], [0.75, 0.25, 0.0], [0.25, 0.25, 0.5]]),
    q=np.array([[0.25, 0.5, 0.25], [0.5, 0.0, 0.5], [0.5, 0.25, 0.25]]),
)
"""Rows that differ in p, in q and in their residual, and reject a token whose own row is another; on quarters."""


def greedy(row: Row) -> Row:
    return np.eye(len(row))[np.argmax(row)]


def top_2(row: Row) -> Row:
    kept = np.where(row >= np.sort(row)[-2], row, 0)
    return kept / kept.sum()


def softmax_residual(p: Row, q: Row) -> Row:
    left = np.exp(residual(p[None], q[None])[0])
    return left / left.sum()


def play(
    world: World,
    gamma: int,
    draft_u: Row,
    accept_u: Row,
    emit_u: float,
    *,
    drawn: Callable[[Row], Row] = lambda q: q,
    declared: Callable[[Row], Row] = lambda q: q,
    accepts: Callable[[float, float, float], bool] = lambda u, q, p: u * q < p,
    recovery: Callable[[Row, Row], Row] = lambda p, q: residual(p[None], q[None])[0],
    recovery_row: Callable[[int, int], int] = lambda i, gamma: i,
    bonus_row: Callable[[int], int] = lambda gamma: gamma,
    drops: Callable[[int, Row], bool] = lambda x, q: False,
) -> tuple[int, ...]:
    """One round from token 0 on; every hook stands at one planted error and is harmless by default."""
    contexts = [0]
    for i in range(gamma):
        contexts.append(_draw(drawn(world.q[contexts[-1]]), draft_u[i]))
    for i in range(gamma):
        if drops(contexts[i + 1], declared(world.q[contexts[i]])):
            contexts = contexts[: i + 1]
            break
    kept = len(contexts) - 1
    for i in range(kept):
        p, q, x = world.p[contexts[i]], declared(world.q[contexts[i]]), contexts[i + 1]
        if not accepts(accept_u[i], q[x], p[x]):
            row = contexts[recovery_row(i, kept)]
            weights = recovery(world.p[row], declared(world.q[row]))
            return (*contexts[1 : i + 1], _draw(weights, emit_u))
    return (*contexts[1:], _draw(world.p[contexts[bonus_row(kept)]], emit_u))


def _draw(weights: Row, u: float) -> int:
    return int(inverse_cdf(weights[None], np.array([u]))[0])


def law_on_grid(world: World, gamma: int, grid: int, **hooks: Callable) -> Law:
    """The law of a round in a world whose thresholds lie on the grid (left edges, so u = 0 is among them)."""
    law: Law = defaultdict(Fraction)
    for noise in product(range(grid), repeat=2 * gamma + 1):
        u = np.array(noise) / grid
        law[play(world, gamma, u[:gamma], u[gamma : 2 * gamma], u[-1], **hooks)] += Fraction(1, grid ** len(noise))
    return law


def first_token(
    world: World,
    cells: tuple[int, int, int],
    *,
    accept_noise: Callable[[float, float], float] = lambda draft_u, accept_u: accept_u,
    **hooks: Callable,
) -> list[float]:
    """The law of the first token at gamma = 1, on the middles of (draft, accept, emit) cells."""
    law = np.zeros(3)
    for cell in np.ndindex(cells):
        draft_u, accept_u, emit_u = (np.array(cell) + 0.5) / cells
        run = play(world, 1, np.array([draft_u]), np.array([accept_noise(draft_u, accept_u)]), emit_u, **hooks)
        law[run[0]] += 1 / np.prod(cells)
    return [round(float(chance), 9) for chance in law]


def test_the_round_without_a_planted_error_is_exact_and_is_the_production_rule():
    """Guards the controls below: they must fail because of the planted error and nothing else."""
    assert bias(law_on_grid(QUARTERS, gamma=2, grid=4), QUARTERS.p, start=0) == 0
    rng = np.random.default_rng(0)
    for _ in range(200):
        draft_u, accept_u, emit_u = rng.random(2), rng.random(2), rng.random()
        run = play(QUARTERS, 2, draft_u, accept_u, emit_u)
        x = [_draw(QUARTERS.q[0], draft_u[0])]
        x.append(_draw(QUARTERS.q[x[0]], draft_u[1]))
        rows = [0, *x]
        result = dense_round(QUARTERS.p[rows], QUARTERS.q[rows[:2]], np.array(x), accept_u, emit_u)
        assert run == (*x[: result.accepted], result.token)


def test_pair_a_accepts_seven_tenths_and_emits_p():
    """Guards the worked example that the planted errors are measured against."""
    assert first_token(PAIR_A, (10, 30, 1)) == [0.5, 0.3, 0.2]
    assert residual(PAIR_A.p[:1], PAIR_A.q[:1])[0] / 0.3 == pytest.approx([1, 0, 0])
    accepted = [
        dense_round(PAIR_A.p[:2], PAIR_A.q[:1], np.array([_draw(PAIR_A.q[0], x)]), np.array([u]), 0.0).accepted
        for x in (np.arange(10) + 0.5) / 10
        for u in (np.arange(30) + 0.5) / 30
    ]
    assert np.mean(accepted) == pytest.approx(0.7)


def test_softmax_on_the_residual_is_caught():
    """Guards against squeezing (p - q)+ through a softmax: tokens of residual 0 would come out."""
    softmax = softmax_residual(PAIR_A.p[0], PAIR_A.q[0])
    assert softmax == pytest.approx([0.403, 0.299, 0.299], abs=5e-4)
    expected = np.minimum(PAIR_A.p[0], PAIR_A.q[0]) + 0.3 * softmax
    assert first_token(PAIR_A, (10, 30, 40), recovery=softmax_residual) == pytest.approx(expected, abs=0.01)
    assert bias(law_on_grid(QUARTERS, gamma=2, grid=4, recovery=softmax_residual), QUARTERS.p, start=0) > 0


def test_q_taken_before_top_k_is_caught():
    """Guards against filters applied when drawing but not when declaring q."""
    filtered = World(np.array([top_2(row) for row in PAIR_A.p]), PAIR_A.q)
    assert first_token(filtered, (8, 15, 8), drawn=top_2, declared=top_2) == [0.625, 0.375, 0]
    assert first_token(filtered, (8, 4, 8), drawn=top_2) == pytest.approx([0.531, 0.469, 0], abs=5e-4)


def test_raw_q_with_a_greedy_draft_is_caught():
    """Guards against declaring the softmax when the draft took the argmax: the q really used is one-hot."""
    assert first_token(PAIR_A, (1, 10, 7), drawn=greedy, declared=greedy) == [0.5, 0.3, 0.2]
    assert first_token(PAIR_A, (1, 10, 7), drawn=greedy) == [0.4, 0.6, 0]


def test_accept_noise_shared_with_draft_noise_is_caught():
    """Guards against one word used for two purposes."""
    assert first_token(PAIR_A, (30, 1, 1), accept_noise=lambda draft_u, accept_u: draft_u) == [0.6, 0.4, 0]


def test_dropping_a_token_after_looking_at_it_is_caught():
    """Guards against giving a drafted token up because of what it is: a slot is verified or lost before x exists."""
    assert first_token(PAIR_A, (10, 30, 10), drops=lambda x, q: q[x] < 0.25) != [0.5, 0.3, 0.2]
    assert bias(law_on_grid(QUARTERS, gamma=2, grid=4, drops=lambda x, q: x == 2), QUARTERS.p, start=0) > 0


def test_accepting_equality_is_caught_at_u_zero():
    """Guards the strict comparison: with `<=`, a drafted token of p = 0 passes whenever u = 0."""
    world = World(np.tile([0.5, 0.5, 0.0], (3, 1)), np.tile([0.25, 0.25, 0.5], (3, 1)))
    assert bias(law_on_grid(world, gamma=1, grid=4), world.p, start=0) == 0
    planted = law_on_grid(world, gamma=1, grid=4, accepts=lambda u, q, p: u * q <= p)
    assert bias(planted, world.p, start=0) > 0
    assert any(run[0] == 2 for run in planted)


@pytest.mark.parametrize(
    "hook",
    [
        pytest.param({"bonus_row": lambda gamma: gamma - 1}, id="bonus from the row before"),
        pytest.param({"bonus_row": lambda gamma: 0}, id="bonus from the first row"),
        pytest.param({"recovery_row": lambda i, gamma: i + 1}, id="recovered token from the row behind"),
        pytest.param({"recovery_row": lambda i, gamma: max(i - 1, 0)}, id="recovered token from the row before"),
        pytest.param({"recovery_row": lambda i, gamma: gamma}, id="recovered token from the last row"),
    ],
)
def test_a_token_from_the_wrong_row_is_caught(hook):
    """Guards row arithmetic: every emitted token must come from the row of its own predecessor."""
    assert bias(law_on_grid(QUARTERS, gamma=2, grid=4, **hook), QUARTERS.p, start=0) > 0
