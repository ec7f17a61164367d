"""The rule is exact: the law of a round, enumerated through the production functions, equals plain sampling's."""

from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest

from outrider.distribution import TOTAL, check_slots, draw, quantise
from outrider.noise import Role, coupled_choice, gumbel_row_keys, subkey
from outrider.rule import accepted_counts, dense_round, inverse_cdf, matched_counts, residual
from outrider.seam import Cut
from tests.unit.enumeration import Ints, Law, World, bias, make_world, sparse_rounds

SHAPES = [(3, 0, 8), (3, 1, 8), (3, 2, 8), (4, 2, 8), (3, 3, 4), (4, 3, 4)]
"""(vocabulary, gamma, grid): grids coarse enough that all noise of a round can be walked through."""


def stop_after_zero(contexts: Ints) -> Ints:
    """An early stop that looks at the drafted token: nothing is drafted behind the first token 0 (x itself stays)."""
    gamma = contexts.shape[1] - 1
    stops = np.append(contexts[:, 1:] == 0, np.ones((len(contexts), 1), bool), axis=1)
    return np.minimum(np.argmax(stops, axis=1) + 1, gamma)


def cut_behind_one(contexts: Ints) -> Ints:
    """A cut at the first slot whose q is unusable, which here is every q behind a token 1."""
    unusable = np.append(contexts[:, :-1] == 1, np.ones((len(contexts), 1), bool), axis=1)
    return np.argmax(unusable, axis=1)


@pytest.mark.parametrize("draft", ["sampled", "one-hot"])
@pytest.mark.parametrize(("vocab", "gamma", "grid"), SHAPES)
@pytest.mark.parametrize("keep", [None, stop_after_zero, cut_behind_one])
def test_a_round_has_exactly_the_law_of_plain_sampling(vocab, gamma, grid, draft, keep):
    """Guards the whole standard rule, early stops and cuts included: any bias in any row shows as a fraction > 0."""
    for seed in range(2):
        world = make_world(vocab, grid, seed, draft)
        for start in (0, vocab - 1):
            law = sparse_rounds(world, start, gamma, grid, keep).law()
            assert sum(law.values()) == 1
            assert bias(law, world.p, start) == 0


@pytest.mark.parametrize("keep", [None, stop_after_zero, cut_behind_one])
@pytest.mark.parametrize(("vocab", "gamma", "grid"), [(3, 1, 8), (3, 2, 4), (4, 2, 4)])
def test_dense_form_emits_the_same_tokens_as_the_sparse_form(vocab, gamma, grid, keep):
    """Guards the split into candidates: one emit word for all of them must give what whole rows would have given."""
    world = make_world(vocab, grid, seed=1)
    rounds = sparse_rounds(world, 0, gamma, grid, keep)
    for c, kept, u, emit_u, accepted, token in zip(*rounds, strict=True):
        p, q = world.p[c[: kept + 1]], world.q[c[:kept]]
        assert dense_round(p, q, c[1 : kept + 1], u, emit_u) == (accepted, token)


def test_three_rounds_with_a_gamma_that_follows_the_history_are_exact():
    """Guards the seams between rounds: gamma may depend on earlier outcomes, the text's law may not."""
    world = make_world(vocab=3, grid=8, seed=5)
    rounds = {(s, g): sparse_rounds(world, s, g, grid=8).law() for s in range(3) for g in range(3)}
    # (text, gamma of the next round) -> chance; full acceptance raises gamma, a rejection lowers it.
    texts = {((), 1): Fraction(1)}
    for _ in range(3):
        longer: dict[tuple[tuple[int, ...], int], Fraction] = defaultdict(Fraction)
        for (text, gamma), chance in texts.items():
            for run, run_chance in rounds[text[-1] if text else 0, gamma].items():
                after = min(gamma + 1, 2) if len(run) == gamma + 1 else max(gamma - 1, 0)
                longer[(*text, *run), after] += chance * run_chance
        texts = longer
    law: Law = defaultdict(Fraction)
    for (text, _), chance in texts.items():
        law[text] += chance
    assert max(len(text) for text in law) == 8
    assert bias(law, world.p, start=0) == 0


def test_draft_ahead_token_tested_against_the_bonus_row_is_exact():
    """Guards draft-ahead: the draft's next token z stands in for the bonus, so full acceptance emits no other."""
    world, gamma = make_world(vocab=3, grid=8, seed=2), 2
    with_z = sparse_rounds(world, 0, gamma, grid=8).law()
    law: Law = defaultdict(Fraction)
    for run, chance in with_z.items():
        law[run[:gamma]] += chance
    assert {len(run) for run in law} == {1, 2}
    assert bias(law, world.p, start=0) == 0


def test_at_temperature_zero_every_draft_gives_the_greedy_text():
    """Guards the greedy special case: one-hot p through the general rule, and through token matching."""
    vocab, gamma, grid = 4, 2, 4
    world = make_world(vocab, grid, seed=3)
    greedy = World(np.eye(vocab)[[2, 3, 1, 0]], world.q)
    rounds = sparse_rounds(greedy, 0, gamma, grid)
    assert set(rounds.law()) <= {(2,), (2, 1), (2, 1, 3)}
    emitted = np.argmax(greedy.p[rounds.contexts[:, :-1]], axis=2)
    matched = matched_counts(rounds.contexts[:, 1:].ravel(), emitted.ravel(), np.full(len(rounds.kept), gamma))
    assert np.array_equal(matched, rounds.accepted)


def test_cutting_at_the_malformed_slot_is_exact_and_dropping_the_proposal_is_not():
    """Guards the cut: p = (.5, .5), q_1 = (.9, .1), and q_2 malformed only behind x_1 = 0."""
    p, q1 = np.array([[0.5, 0.5]]), quantise(np.arange(2), np.array([0.9, 0.1]))
    cut_law, drop_law = np.zeros(2), np.zeros(2)
    for draft_u, accept_u, emit_u in np.ndindex(10, 9, 2):
        x1 = draw(q1, int((draft_u + 0.5) / 10 * TOTAL))
        q2_counts = [TOTAL // 2, TOTAL // 2 - (x1 == 0)]
        cuts = check_slots(
            support_sizes=np.array([2, 2], np.uint16),
            q_ids=np.array([0, 1, 0, 1], np.uint32),
            q_counts_minus_one=np.array([*q1.counts, *q2_counts], np.int64).astype(np.uint16) - np.uint16(1),
            draft_ids=np.array([x1, 0], np.uint32),
            own_counts_minus_one=np.array([q1.counts[x1] - 1, TOTAL // 2 - 1], np.uint16),
        )
        assert list(cuts) == [Cut.NONE, Cut.MALFORMED_Q if x1 == 0 else Cut.NONE]
        emit = np.array([(emit_u + 0.5) / 2])
        u = np.array([(accept_u + 0.5) / 9])
        accepted = accepted_counts(p[0, [x1]].astype(np.float32), q1.counts[[x1]], u, np.array([1]))[0]
        recovered = inverse_cdf(residual(p, q1.counts[None] / TOTAL), emit)[0]
        first = x1 if accepted else recovered
        cut_law[first] += 1 / 180
        drop_law[inverse_cdf(p, emit)[0] if cuts.any() else first] += 1 / 180
    assert cut_law == pytest.approx([0.5, 0.5])
    assert drop_law == pytest.approx([0.45, 0.55])


def test_coupled_text_is_the_plain_text_whatever_the_draft_and_gamma():
    """Guards the coupled rule: losslessness at temperature 1 as an equality of tokens."""
    rng = np.random.default_rng(0)
    vocab, length = 12, 60
    p = rng.dirichlet(np.ones(vocab), vocab)
    keys = np.array([subkey(seed=11, role=Role.GUMBEL)], np.uint64)

    def choose(row: np.ndarray, position: int) -> int:
        row_keys = gumbel_row_keys(keys, np.array([position], np.uint32), np.zeros(1, np.uint32))
        return int(coupled_choice(row[None], row_keys)[0])

    plain = [0]
    while len(plain) <= length:
        plain.append(choose(p[plain[-1]], len(plain)))

    for sharpness in (0.0, 0.5, 0.9, 1.0):
        q = sharpness * p + (1 - sharpness) * rng.dirichlet(np.ones(vocab), vocab)
        text, accepted_total = [0], 0
        while len(text) <= length:
            gamma = int(rng.integers(0, 5))
            drafted = text[-1:]
            for i in range(gamma):
                drafted.append(choose(q[drafted[-1]], len(text) + i))
            emitted = [choose(p[token], len(text) + i) for i, token in enumerate(drafted)]
            accepted = int(matched_counts(np.array(drafted[1:]), np.array(emitted[:gamma]), np.array([gamma]))[0])
            text += emitted[: accepted + 1]
            accepted_total += accepted
        assert text[: length + 1] == plain
        assert accepted_total > 0


def test_enumerator_reports_the_bias_of_a_wrong_law():
    """Guards the oracle itself: a law that is off by a known amount must not come out as exact."""
    world = make_world(vocab=3, grid=8, seed=0)
    law = sparse_rounds(world, 0, 1, grid=8).law()
    run = max(law, key=lambda r: (len(r), law[r]))
    moved = Fraction(1, 64)
    law[run] -= moved
    other = (*run[:-1], (run[-1] + 1) % 3)
    law[other] = law.get(other, Fraction(0)) + moved
    assert bias(law, world.p, start=0) == moved
