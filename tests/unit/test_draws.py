"""The torch twins of the rule's draws give the same tokens as the numpy originals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider import noise, rule
from outrider.distribution import quantise_rows
from outrider.engine import draws
from outrider.engine.draws import _filled, coupled_choice, draft_distribution, gumbel_words, inverse_cdf, residual

pytestmark = pytest.mark.usefixtures("one_thread")


def rows_of_p(n: int, vocab: int, spread: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn((n, vocab), generator=generator) * spread, dim=-1)


@pytest.mark.parametrize(("n", "vocab"), [(1, 3), (40, 1000), (9, 70_000)])
def test_inverse_cdf_is_bit_identical_to_the_rule(n: int, vocab: int):
    """Guards sparse against dense form: both sides must emit the same token for the same u."""
    weights = rows_of_p(n, vocab, 3.0) * torch.linspace(0.01, 2, n)[:, None]
    for u in (np.random.default_rng(1).random(n), np.zeros(n), np.full(n, 1 - 2.0**-53)):
        np.testing.assert_array_equal(inverse_cdf(weights, u), rule.inverse_cdf(weights.numpy(), u))


@pytest.mark.parametrize("u", [0.0, 0.25, 0.5, 1 - 2.0**-53])
def test_inverse_cdf_never_draws_a_token_of_weight_0(u: float):
    """Guards u = 0 in front of a zero weight, the end of the row, and every edge between two tokens."""
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.25, 0.0], [0.0, 0.0, 1e-30, 0.0, 0.0]])
    drawn = inverse_cdf(weights, np.full(2, u))
    assert all(weights[i, drawn[i]] > 0 for i in range(2))


def test_a_row_without_weight_does_not_spoil_the_others():
    """Guards a batch in which one stream's row is faulty."""
    weights = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert inverse_cdf(weights, np.array([0.5, 0.5])).tolist() == [2, 1]


def sparse(q_rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    at = np.repeat(np.arange(len(q_rows)), [len(q.ids) for q in q_rows])
    ids = np.concatenate([q.ids for q in q_rows]).astype(np.int64)
    return at, ids, np.concatenate([q.counts for q in q_rows]) / 65536


def test_residual_equals_the_rules_in_single_precision():
    """Guards the exactness of p - q in float32, and ids that the target does not have."""
    p, q = rows_of_p(20, 500, 2.0, seed=1), draft_distribution(rows_of_p(20, 600, 2.0, seed=2), 64)
    at, ids, probs = sparse(quantise_rows(q.probs, q.ids))
    dense = np.zeros((20, 600))
    dense[at, ids] = probs
    assert (ids >= 500).any()
    np.testing.assert_array_equal(
        residual(p, at, ids, probs).numpy().astype(np.float64), rule.residual(p.numpy(), dense[:, :500])
    )


def test_residual_of_equal_rows_is_p_itself():
    """Guards against 0 / 0 where draft and target agree to the last bit."""
    p = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]])
    at, ids = np.array([0, 0, 1]), np.array([0, 1, 0])
    q = np.array([0.5, 0.5, 1.0])
    np.testing.assert_array_equal(residual(p, at, ids, q).numpy(), [[0.5, 0.5, 0.0], [0.0, 0.25, 0.25]])
    # On a GPU every row is looked at, so that nothing has to be read: rows without any weight stay as they are.
    out = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.25, 0.25]])
    assert torch.equal(_filled(out, p), torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.25]]))
    assert not _filled(torch.zeros((1, 3)), torch.zeros((1, 3))).any()


def test_residual_works_the_worked_number():
    """p = [.5, .3, .2], q = [.2, .5, .3]: the residual is token 0 alone, no softmax over it."""
    p = torch.tensor([[0.5, 0.3, 0.2]])
    left = residual(p, np.zeros(3, np.int64), np.arange(3), np.array([0.2, 0.5, 0.3]))
    assert left[0, 0] > 0 and not left[0, 1:].any()


def test_gumbel_words_are_the_integers_of_the_noise_module():
    """Guards shifts of negative integers and wrapping products."""
    keys = np.random.default_rng(2).integers(0, 2**64, 50, dtype=np.uint64)
    halves = [torch.from_numpy((keys >> np.uint64(s)).astype(np.uint32).view(np.int32))[:, None] for s in (0, 32)]
    words = gumbel_words(halves[0], halves[1], torch.arange(3000, dtype=torch.int32))
    np.testing.assert_array_equal(words.numpy().view(np.uint32), noise.gumbel_words(keys, np.arange(3000)))


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 40.0])
def test_coupled_choice_equals_the_noise_modules(spread: float):
    """Guards the short list of ids that can win, for flat, ordinary and nearly certain rows."""
    p = rows_of_p(60, 3001, spread)
    keys = np.random.default_rng(3).integers(0, 2**64, 60, dtype=np.uint64)
    np.testing.assert_array_equal(coupled_choice(p, keys), noise.coupled_choice(p.numpy(), keys))


def test_coupled_choice_leaves_no_winner_out_where_the_noise_is_largest():
    """Planted words: a likely token with the largest noise there is must still lose or win by its exact score."""
    keys = np.arange(4000, dtype=np.uint64)
    p = torch.tensor([[0.999, 0.001]]).expand(4000, 2).contiguous()
    expected = noise.coupled_choice(p.numpy(), keys)
    np.testing.assert_array_equal(coupled_choice(p, keys), expected)
    assert 0 < expected.sum() < 20


def test_coupled_choice_never_takes_a_token_of_weight_0():
    """Guards ids that a filter dropped, and the lowest id among equals in a faulty row."""
    p = torch.zeros((50, 400))
    p[:, 77] = 1.0
    assert (coupled_choice(p, np.arange(50, dtype=np.uint64)) == 77).all()
    assert (coupled_choice(torch.zeros((2, 400)), np.arange(2, dtype=np.uint64)) == 0).all()


def test_draft_distribution_keeps_the_fewest_ids_that_reach_the_mass():
    """Guards the size of q on the wire, and its limit."""
    p = torch.tensor([[0.1, 0.6, 0.2995, 0.0005], [0.25, 0.25, 0.25, 0.25]])
    ids, probs = draft_distribution(p, draft_top_k=3, mass=0.995)
    assert [len(row.ids) for row in quantise_rows(probs, ids)] == [3, 3]
    ids, probs = draft_distribution(p, draft_top_k=128, mass=0.85)
    assert [row.ids.tolist() for row in quantise_rows(probs, ids)] == [[1, 2], [0, 1, 2, 3]]


def test_draft_distribution_never_holds_excluded_ids():
    """Guards ids that the target gives another meaning; a row with nothing else has no support at all."""
    p = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    ids, probs = draft_distribution(p, 128, excluded=torch.tensor([True, False, False]))
    assert set(ids[0][probs[0] > 0]) == {1, 2}
    assert not probs[1].any()


def test_a_one_hot_row_gives_a_one_hot_q():
    """Guards greedy drafts, whose q must cost nothing on the wire."""
    ids, probs = draft_distribution(torch.eye(500)[[7, 400]], 128)
    rows = quantise_rows(probs, ids)
    assert [(row.ids.tolist(), row.counts.tolist()) for row in rows] == [([7], [65536]), ([400], [65536])]


def test_chunks_do_not_change_a_draw(monkeypatch: pytest.MonkeyPatch):
    """Guards rows at the edges of a chunk."""
    p, u = rows_of_p(11, 300, 2.0), np.random.default_rng(4).random(11)
    keys = np.arange(11, dtype=np.uint64)
    before = inverse_cdf(p, u), coupled_choice(p, keys)
    monkeypatch.setattr(draws, "_CPU_CHUNK", 700)
    np.testing.assert_array_equal(before, (inverse_cdf(p, u), coupled_choice(p, keys)))
