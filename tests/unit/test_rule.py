"""The rule's functions one by one; that their composition is exact is tested in test_enumeration."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.distribution import TOTAL
from outrider.rule import accepted_counts, dense_round, inverse_cdf, matched_counts, residual

ITEM = st.lists(
    st.tuples(st.floats(0, 1, width=32), st.integers(1, TOTAL), st.floats(0, 1, exclude_max=True)), max_size=4
)


@given(st.lists(ITEM, max_size=6))
def test_accepted_counts_equal_a_walk_over_each_item(items):
    """Guards the vectorised walk over ragged items, empty ones included."""
    expected = []
    for item in items:
        count = 0
        while count < len(item) and item[count][2] * (item[count][1] / TOTAL) < item[count][0]:
            count += 1
        expected.append(count)
    p, own, u = (np.array([slot[i] for item in items for slot in item]) for i in range(3))
    sizes = np.array([len(item) for item in items], np.uint8)
    assert accepted_counts(p.astype(np.float32), own.astype(np.uint32), u, sizes).tolist() == expected


def test_accepted_counts_ignore_what_lies_behind_a_rejection():
    """Guards alpha and the text: slots behind a rejection are untested, however good they look."""
    p = np.array([1, 0, 1, 1, 1], np.float32)
    counts = accepted_counts(p, np.full(5, TOTAL), np.full(5, 0.5), np.array([3, 0, 2]))
    assert counts.tolist() == [1, 0, 2]


@pytest.mark.parametrize("p", [0.0, np.nan])
def test_a_token_without_probability_is_rejected_even_at_u_zero(p):
    """Guards the strict comparison, and that a NaN never accepts."""
    assert accepted_counts(np.array([p], np.float32), np.array([1]), np.zeros(1), np.array([1])).tolist() == [0]


@given(st.integers(1, TOTAL), st.integers(0, 2**53 - 1))
def test_a_token_that_the_target_likes_as_much_is_always_accepted(count, u53):
    """Guards self-draft acceptance: p >= q must accept for every uniform, the largest below 1 included."""
    p = np.array([count / TOTAL], np.float32)
    for u in (u53 * 2.0**-53, 1 - 2.0**-53):
        assert accepted_counts(p, np.array([count]), np.array([u]), np.array([1])).tolist() == [1]


def test_matched_counts_stop_at_the_first_mismatch():
    """Guards the coupled rule's count over several items."""
    draft, emit = np.array([5, 6, 7, 1, 2, 9]), np.array([5, 0, 7, 1, 2, 8])
    assert matched_counts(draft, emit, np.array([3, 2, 0, 1], np.uint8)).tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize("u", [0.0, 0.3, 0.5, 1 - 2.0**-53])
def test_inverse_cdf_never_returns_a_token_of_weight_zero(u):
    """Guards both ends: u = 0 before the first positive weight, u near 1 behind the last, and steps on a boundary."""
    weights = np.array([[0, 0, 1, 0, 1, 0], [0, 1e-30, 0, 0, 0, 0], [1e-8, 0, 0, 0, 1, 0]], np.float32)
    ids = inverse_cdf(weights, np.full(3, u))
    assert np.all(weights[np.arange(3), ids] > 0)


@given(st.integers(0, 2**32 - 1), st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_returns_a_positive_weight_on_rounded_rows(seed, u):
    """Guards against float rows whose sum is not 1: u is scaled by the sum that was really reached."""
    rng = np.random.default_rng(seed)
    row = rng.dirichlet(np.full(50, 0.05)).astype(np.float32) * (rng.random(50) < 0.5)
    row[rng.integers(50)] += np.float32(1e-6)
    for uniform in (u, 0.0, 1 - 2.0**-53):
        assert row[inverse_cdf(row[None], np.array([uniform]))[0]] > 0


def test_inverse_cdf_steps_at_the_cumulative_weights():
    """Guards id order and the side of the boundary: u exactly on a step belongs to the next token."""
    assert inverse_cdf(np.tile([1.0, 2.0, 1.0], (5, 1)), np.array([0, 0.2, 0.25, 0.7, 0.75])).tolist() == [
        0,
        0,
        1,
        1,
        2,
    ]


@pytest.mark.parametrize("row", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_inverse_cdf_refuses_a_row_that_is_no_distribution(row):
    """Guards against a NaN row turning into a plausible token id."""
    with pytest.raises(ValueError, match="positive sum"):
        inverse_cdf(np.array([[1.0, 1.0], row]), np.array([0.5, 0.5]))


def test_residual_without_a_positive_entry_is_p_itself():
    """Guards 0 / 0: the fall-back row is p, row by row, so what is emitted has p > 0, wherever q is positive."""
    p = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.5, 0.3, 0.2]])
    q = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 1e-9], [0.2, 0.5, 0.3]])
    assert residual(p, q) == pytest.approx(np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.3, 0.0, 0.0]]), abs=1e-12)


def test_residual_has_no_threshold():
    """Guards tiny differences: an excess of 1e-12 is still the only thing that may be emitted."""
    p = np.array([[0.5 + 1e-12, 0.5 - 1e-12]])
    assert np.flatnonzero(residual(p, np.array([[0.5, 0.5]]))[0]).tolist() == [0]


def test_residual_of_a_one_hot_draft_is_p_without_that_token():
    """Guards deterministic drafts: on rejection p without x, renormalised by the draw."""
    assert residual(np.array([[0.5, 0.3, 0.2]]), np.array([[0.0, 1.0, 0.0]])).tolist() == [[0.5, 0.0, 0.2]]


def test_dense_round_emits_the_bonus_from_the_row_behind_the_last_token():
    """Guards the bonus: gamma accepted tokens and one more, from row gamma + 1."""
    p = np.eye(4)[[1, 2, 3]]
    assert dense_round(p, p[:2], np.array([1, 2]), np.array([0.9, 0.9]), 0.5) == (2, 3)


def test_dense_round_of_no_drafted_tokens_is_a_plain_step():
    """Guards gamma = 0."""
    assert dense_round(np.array([[0.25, 0.75]]), np.empty((0, 2)), np.empty(0, int), np.empty(0), 0.25) == (0, 1)
