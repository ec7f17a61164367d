"""The formulas against brute force, and the joint choice of gammas against all allocations."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.economics import (
    LinearCost,
    best_gamma,
    choose_gammas,
    crossover_batch,
    expected_tokens,
    improvement,
    survival,
    tokens_per_s,
)

STUB = LinearCost(fixed_s=0.010, token_s=0.0005, free_tokens=16)
"""The closed-form stub pair: 10 ms up to 16 tokens, then 0.5 ms per token; drafting 1 ms per slot; acceptance .8."""


@given(st.lists(st.floats(0, 1), max_size=6))
def test_expected_tokens_equal_the_mean_over_all_outcomes(s):
    """Guards E(gamma) for acceptance that differs by position: every pattern of accepts and rejects, weighted."""
    mean = 0.0
    for pattern in product([True, False], repeat=len(s)):
        chance = math.prod(a if accepted else 1 - a for a, accepted in zip(s, pattern, strict=True))
        emitted = 1 + (pattern.index(False) if False in pattern else len(pattern))
        mean += chance * emitted
    assert expected_tokens(s) == pytest.approx(mean)


def test_expected_tokens_agree_with_a_simulation_of_rounds():
    """Guards the meaning of s_i (given that the slot is tested): 40,000 rounds of five coins, to four deviations."""
    s = np.array([0.9, 0.7, 0.8, 0.5, 0.6])
    accepts = np.random.default_rng(0).random((40_000, 5)) < s
    emitted = 1 + np.logical_and.accumulate(accepts, axis=1).sum(axis=1)
    assert abs(emitted.mean() - expected_tokens(s)) < 4 * emitted.std() / 200


@pytest.mark.parametrize("gamma", [0, 1, 4, 9])
def test_one_alpha_gives_the_papers_closed_form(gamma):
    """Guards the iid summary (Leviathan et al., equation 1)."""
    assert expected_tokens(0.75, gamma) == pytest.approx((1 - 0.75 ** (gamma + 1)) / 0.25)
    assert improvement(0.75, gamma, c=0.05) == pytest.approx(expected_tokens(0.75, gamma) / (0.05 * gamma + 1))


def test_improvement_of_a_nearly_free_draft_tends_to_its_limit():
    """Guards the asymptote 1 / (1 - alpha)."""
    assert improvement(0.8, gamma=100, c=0.0) == pytest.approx(5)


def test_acceptance_must_cover_the_slots_asked_for():
    """Guards against silently pricing unknown positions at zero."""
    with pytest.raises(ValueError, match="not for 3"):
        expected_tokens([0.9, 0.8], 3)
    with pytest.raises(ValueError, match="needs gamma"):
        survival(0.9)


@pytest.mark.parametrize(("alpha", "c", "expected"), [(0.05, 0.1, 0), (0.0, 0.0, 0), (0.8, 0.1, 6), (0.99, 0.001, 12)])
def test_best_gamma_is_the_argmax_and_may_be_zero(alpha, c, expected):
    """Guards the controller's prior: 0 where drafting costs more than it gives or gives nothing, the cap where free."""
    assert best_gamma(alpha, c, gamma_max=12) == expected
    values = [improvement(alpha, gamma, c) for gamma in range(13)]
    assert values[expected] == max(values)


@pytest.mark.parametrize(
    ("streams", "rates"),
    [(1, (100, 164, 240)), (8, (800, 1309, 1034)), (16, (1600, 1516, 1169)), (32, (1778, 1646, 1251))],
)
def test_stub_pair_gives_its_closed_form_table(streams, rates):
    """Guards the prediction that measured runs of the stub pair are scored against (gamma 0, 1 and 4)."""
    for gamma, rate in zip((0, 1, 4), rates, strict=True):
        assert round(tokens_per_s(streams, gamma, 0.8, STUB, overhead_s=0.001 * gamma)) == rate


def test_stub_pair_crosses_over_where_it_should():
    """Guards the crossover: between 10 and 12 streams for gamma 4, between 14 and 16 for gamma 1."""
    assert 10 < crossover_batch(0.8, 4, STUB, overhead_s=0.004) < 12
    assert 14 < crossover_batch(0.8, 1, STUB, overhead_s=0.001) < 16


@given(
    alpha=st.floats(0.05, 1),
    gamma=st.integers(1, 6),
    cost=st.builds(LinearCost, st.floats(1e-3, 1), st.floats(1e-5, 0.1), st.integers(0, 40)),
    overhead_s=st.floats(0, 0.5),
)
def test_speculation_pays_below_the_crossover_and_not_above(alpha, gamma, cost, overhead_s):
    """Guards all three pieces of the cost: the ratio of throughputs changes sides at the returned batch."""
    batch = crossover_batch(alpha, gamma, cost, overhead_s)

    def gain(streams: float) -> float:
        return expected_tokens(alpha, gamma) * float(cost(streams)) - float(cost(streams * (gamma + 1))) - overhead_s

    tolerance = 1e-9
    if batch == math.inf:
        assert gain(1e6) > -1e-3
    elif batch == 0:
        assert gain(1e-9) <= tolerance
    else:
        assert gain(batch) == pytest.approx(0, abs=1e-6 * max(1, batch))
        assert gain(batch * 0.9) >= -tolerance
        assert gain(batch * 1.1) <= tolerance


def test_there_is_no_crossover_where_everything_is_accepted_and_drafting_is_free():
    """Guards the "none" case: E = gamma + 1 saves whole passes at any batch."""
    assert crossover_batch(1.0, 4, STUB) == math.inf


@st.composite
def loads(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Survivals [streams, depth], a monotone step table, draft costs by depth, and a round trip."""
    streams, depth = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    chance = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0]))
    s = draw(st.lists(st.lists(chance, min_size=depth, max_size=depth), min_size=streams, max_size=streams))
    increments = st.floats(0, 1)
    size = streams * (depth + 1) + 1
    steps = np.cumsum(draw(st.lists(increments, min_size=size, max_size=size))) + draw(st.floats(0.1, 5))
    drafts = np.cumsum(draw(st.lists(increments, min_size=depth + 1, max_size=depth + 1)))
    return survival(np.array(s).reshape(streams, depth)), steps, drafts, draw(st.floats(0, 1))


def rate(gammas: tuple[int, ...], survivals: np.ndarray, steps: np.ndarray, drafts: np.ndarray, rtt: float) -> float:
    """G of one allocation, straight from its definition."""
    tokens = sum(1 + survivals[j, :gamma].sum() for j, gamma in enumerate(gammas))
    return tokens / (steps[sum(gammas) + len(gammas)] + drafts[max(gammas)] + rtt)


@given(loads())
def test_gammas_chosen_together_are_the_best_of_all_allocations(load):
    """Guards the greedy order: up to four streams, every allocation tried."""
    survivals, steps, drafts, rtt = load
    streams, depth = survivals.shape
    chosen = choose_gammas(survivals, steps, drafts, rtt)
    assert chosen.shape == (streams,)
    best = max(rate(gammas, *load) for gammas in product(range(depth + 1), repeat=streams))
    assert rate(tuple(chosen), *load) == pytest.approx(best)


def test_a_streams_own_best_gamma_is_not_the_joint_best():
    """Guards the joint choice: at 8 streams of the stub pair everybody's own best costs a third of the throughput."""
    drafts = 0.001 * np.arange(9)
    own = choose_gammas(survival(0.8, 8)[None], STUB, drafts)[0]
    joint = choose_gammas(np.tile(survival(0.8, 8), (8, 1)), STUB, drafts)
    assert (own, joint.tolist()) == (6, [1] * 8)
    own_rate, joint_rate = (tokens_per_s(8, gamma, 0.8, STUB, drafts[gamma]) for gamma in (own, joint[0]))
    assert own_rate / joint_rate < 0.7


def test_a_busy_target_gets_no_drafts_and_an_idle_one_does():
    """Guards the crossover being acted on, with a step cost given as a function and as a table."""
    for streams, expected in ((1, 6), (32, 0)):
        survivals = np.tile(survival(0.8, 8), (streams, 1))
        table = STUB(np.arange(streams * 9 + 1))
        for cost in (STUB, table):
            assert set(choose_gammas(survivals, cost, 0.001 * np.arange(9)).tolist()) == {expected}


def test_slots_of_no_survival_are_never_chosen_even_when_free():
    """Guards caps: a stream limited by its own settings or its remaining tokens keeps to its limit."""
    survivals = np.array([[0.9, 0.0, 0.0], [0.9, 0.8, 0.7], [0.0, 0.0, 0.0]])
    assert choose_gammas(survivals, np.ones(13), np.zeros(4)).tolist() == [1, 3, 0]


def test_no_streams_and_no_depth_are_legal():
    """Guards the ends: an idle coordinator, and a deployment without a draft."""
    assert choose_gammas(np.empty((0, 4)), STUB, np.zeros(5)).tolist() == []
    assert choose_gammas(np.empty((3, 0)), STUB, np.zeros(1)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("survivals", "drafts"), [([[0.5, 0.6]], [0, 1, 2]), ([[0.6, 0.5]], [0, 2, 1])])
def test_tables_that_would_mislead_the_greedy_order_are_refused(survivals, drafts):
    """Guards the precondition: survivals fall and draft costs rise with depth."""
    with pytest.raises(ValueError, match="with depth"):
        choose_gammas(np.array(survivals), np.ones(4), np.array(drafts))
