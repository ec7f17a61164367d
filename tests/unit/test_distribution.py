"""Integer-count q: rounding by the book, draws that match the counts, and judgement of what a draft declares."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.distribution import TOTAL, CountRow, check_slots, draw, draw_rows, quantise, quantise_rows, truncate
from outrider.seam import Cut

WEIGHT = st.one_of(st.just(0.0), st.floats(2.0**-40, 1, width=32), st.sampled_from([0.25, 0.5, 1.0]))
ROW = st.dictionaries(st.integers(0, 200_000), WEIGHT, min_size=1, max_size=40).filter(lambda row: any(row.values()))


def quantise_by_the_book(row: dict[int, float]) -> dict[int, int]:
    """The rounding rule in plain Python, one step at a time."""
    weights = {i: w for i, w in sorted(row.items()) if w > 0}
    mass = 0.0
    for weight in weights.values():
        mass += weight
    exact = {i: w / mass * TOTAL for i, w in weights.items()}
    counts = {i: max(int(e), 1) for i, e in exact.items()}
    while sum(counts.values()) < TOTAL:
        counts[max(exact, key=lambda i: (exact[i] - counts[i], -i))] += 1
    if (excess := sum(counts.values()) - TOTAL) > 0:
        counts[max(counts, key=lambda i: (counts[i], -i))] -= excess
    return counts


def as_dict(row: CountRow) -> dict[int, int]:
    return dict(zip(row.ids.tolist(), row.counts.tolist(), strict=True))


@given(ROW)
def test_counts_follow_the_rounding_rule(row):
    """Guards the wire format: both sides and every version must hold the same rational numbers."""
    counts = quantise(np.array(list(row)), np.array(list(row.values())))
    assert as_dict(counts) == quantise_by_the_book(row)


@given(ROW)
def test_counts_are_a_distribution_on_the_ids_of_positive_weight(row):
    """Guards validity: whatever comes in, the target must find rising ids and counts from 1 that sum to 2^16."""
    ids, counts = quantise(np.array(list(row)), np.array(list(row.values())))
    assert ids.dtype == counts.dtype == np.uint32
    assert set(ids.tolist()) == {i for i, weight in row.items() if weight > 0}
    assert np.all(np.diff(ids.astype(np.int64)) > 0)
    assert counts.min() >= 1
    assert counts.sum() == TOTAL


@given(st.lists(ROW, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_order_padding_or_batch(rows, random):
    """Guards seeds: the same q must give the same counts in whatever batch it rides."""
    width = max(len(row) for row in rows) + random.randint(0, 9)
    ids, probs = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width))
    for i, row in enumerate(rows):
        items = list(row.items())
        random.shuffle(items)
        ids[i, : len(items)], probs[i, : len(items)] = zip(*items, strict=True)
    for row, batched in zip(rows, quantise_rows(probs, ids), strict=True):
        assert as_dict(batched) == as_dict(quantise(np.array(list(row)), np.array(list(row.values()))))


def test_padding_does_not_change_how_the_mass_is_rounded():
    """Guards the order of summation: pairwise sums change with the width, and one ulp moves a count between ties."""
    weights = np.array([1, 2, 9, 8, 4, 8, 2, 8, 2, 7, 11, 10]) / 10
    ids = np.arange(len(weights))
    for width in range(40):
        padded = quantise_rows(np.pad(weights, (0, width))[None], np.pad(ids, (0, width))[None])[0]
        assert padded.counts.tolist() == quantise(ids, weights).counts.tolist()


def test_an_id_raised_to_one_count_gets_nothing_of_the_remainder():
    """Guards the fractions: 0.9 of a count was already rounded up to 1 and may not be rounded up again."""
    exact = np.array([0.9, 32767.55, 32767.55])
    assert as_dict(quantise(np.arange(3), exact)) == {0: 1, 1: 32768, 2: 32767}


def test_remainder_goes_to_the_largest_fractions_and_ties_to_the_lowest_id():
    """Guards the tie rule: three thirds leave one count over, and it belongs to the lowest id, not the first column."""
    assert as_dict(quantise(np.array([9, 4, 7]), np.ones(3))) == {4: 21846, 7: 21845, 9: 21845}


def test_excess_of_raised_counts_is_taken_from_the_largest():
    """Guards tiny weights: they keep one count each, paid for by the largest."""
    assert as_dict(quantise(np.array([0, 1, 2, 3]), np.array([1e-9, 1.0, 1e-9, 1e-9]))) == {0: 1, 1: 65533, 2: 1, 3: 1}


def test_a_support_as_large_as_the_total_has_one_count_each():
    """Guards the far end, where the largest count alone cannot pay: no count may fall below 1."""
    weights = np.linspace(0.01, 1, TOTAL) ** 3
    assert set(quantise(np.arange(TOTAL), weights).counts.tolist()) == {1}
    with pytest.raises(ValueError, match="from 1 to 65536"):
        quantise(np.arange(TOTAL + 1), np.ones(TOTAL + 1))


@pytest.mark.parametrize("weights", [[0.0, 0.0], [0.5, np.nan], [np.inf, 1.0], [1.0, -0.1], []])
def test_what_is_no_distribution_is_refused(weights):
    """Guards against NaN or an empty row becoming a plausible q; a bad row must not pass as a batch of good ones."""
    with pytest.raises(ValueError, match="q"):
        quantise(np.arange(len(weights)), np.array(weights))


@pytest.mark.parametrize("mass", [0.5, 0.995, 1.0])
def test_truncate_keeps_the_fewest_ids_that_reach_the_mass(mass):
    """Guards the size of q on the wire."""
    rng = np.random.default_rng(0)
    probs = -np.sort(-rng.dirichlet(np.full(30, 0.2), 50), axis=1)
    for row, keep in zip(probs, truncate(probs, mass), strict=True):
        assert row[: keep - 1].sum() < mass
        assert row[:keep].sum() >= mass - 1e-12 or keep == 30


def test_truncate_stays_within_the_candidates_and_off_the_zeros():
    """Guards flat rows (mass beyond k is lost, k are kept), one-hot rows, and filtered rows with fewer ids than k."""
    probs = np.array([[0.01, 0.01, 0.01], [1.0, 0.0, 0.0], [0.6, 0.39, 0.0], [0.0, 0.0, 0.0]])
    assert truncate(probs).tolist() == [3, 1, 2, 1]


def test_every_16_bit_word_draws_and_each_id_as_often_as_its_count():
    """Guards the law of the draft's draw, exactly: all 65,536 words, counted."""
    row = quantise(np.array([3, 8, 20, 21]), np.array([0.1, 0.7, 1e-9, 0.2]))
    indices = draw_rows([row] * TOTAL, np.arange(TOTAL))
    assert np.bincount(indices).tolist() == row.counts.tolist()
    assert np.all(np.diff(indices) >= 0)
    edges = np.flatnonzero(np.diff(indices))
    assert [draw(row, int(b)) for e in edges for b in (e, e + 1)] == [indices[b] for e in edges for b in (e, e + 1)]


@given(st.lists(st.tuples(ROW, st.integers(0, TOTAL - 1)), max_size=6))
def test_drawing_many_rows_equals_drawing_each(cases):
    """Guards the running sum over ragged rows."""
    rows = [quantise(np.array(list(row)), np.array(list(row.values()))) for row, _ in cases]
    bits16 = np.array([bits for _, bits in cases], np.uint32)
    assert draw_rows(rows, bits16).tolist() == [draw(row, int(b)) for row, b in zip(rows, bits16, strict=True)]


def test_the_received_q_redraws_the_sent_token():
    """Guards "q on the wire is the q that was sampled": probabilities that no float format holds exactly."""
    rows = quantise_rows(np.tile([1 / 3, 2 / 3 - 1e-3, 1e-3], (10_000, 1)), np.tile([5, 6, 7], (10_000, 1)))
    bits16 = np.random.default_rng(1).integers(0, TOTAL, 10_000)
    sent = draw_rows(rows, bits16)
    received = [CountRow(r.ids.copy(), (r.counts - 1).astype("<u2").astype(np.uint32) + 1) for r in rows]
    assert np.array_equal(draw_rows(received, bits16), sent)


def verdict(ids: list[int], counts: list[int], drawn: int, own: int, size: int | None = None) -> Cut:
    """`check_slots` for one slot standing between two good ones, which must stay good."""
    sizes = np.array([2, len(ids) if size is None else size, 0], np.uint16)
    cuts = check_slots(
        support_sizes=sizes,
        q_ids=np.array([4, 9, *ids], np.uint32),
        q_counts_minus_one=np.array([TOTAL // 2 - 1] * 2 + [count - 1 for count in counts], np.uint16),
        draft_ids=np.array([9, drawn, 1], np.uint32),
        own_counts_minus_one=np.array([TOTAL // 2 - 1, own - 1, TOTAL - 1], np.uint16),
    )
    assert cuts.dtype == np.uint8
    assert (cuts[0], cuts[2]) == (Cut.NONE, Cut.NONE)
    return Cut(int(cuts[1]))


@pytest.mark.parametrize(
    ("ids", "counts", "drawn", "own"),
    [
        pytest.param([1, 2, 3], [1, 1, TOTAL - 2], 2, 1, id="well formed"),
        pytest.param([1, 2**31 - 1], [1, TOTAL - 1], 2**31 - 1, TOTAL - 1, id="ids the target lacks"),
        pytest.param([1], [TOTAL], 1, TOTAL, id="one id spelled out"),
        pytest.param([], [], 7, TOTAL, id="one-hot"),
    ],
)
def test_an_honest_slot_passes(ids, counts, drawn, own):
    """Guards against cutting what is exact as it is; ids beyond the target's vocabulary are an ordinary rejection."""
    assert verdict(ids, counts, drawn, own) is Cut.NONE


@pytest.mark.parametrize(
    ("ids", "counts", "drawn"),
    [
        pytest.param([1, 2], [1, TOTAL], 1, id="mass too large"),
        pytest.param([1, 2], [1, TOTAL - 2], 1, id="mass too small"),
        pytest.param([1, 1], [1, TOTAL - 1], 1, id="repeated id"),
        pytest.param([2, 1], [1, TOTAL - 1], 1, id="falling ids"),
        pytest.param([1, 2**32 - 1], [1, TOTAL - 1], 1, id="negative filler in the support"),
        pytest.param([], [], 2**32 - 1, id="negative filler as a one-hot q"),
    ],
)
def test_a_malformed_q_is_called_malformed_whatever_was_drawn(ids, counts, drawn):
    """Guards the exact cut: malformed is decided from q, so an honest and a lying own count get the same verdict."""
    for own in (1, 5, TOTAL):
        assert verdict(ids, counts, drawn, own) is Cut.MALFORMED_Q


@pytest.mark.parametrize(
    ("ids", "counts", "drawn", "own"),
    [
        pytest.param([1, 2], [1, TOTAL - 1], 3, 1, id="token outside its support"),
        pytest.param([1, 2], [1, TOTAL - 1], 1, 2, id="own count differs"),
        pytest.param([1, 2], [1, TOTAL - 1], 2**32 - 1, 1, id="negative token, good q"),
        pytest.param([], [], 7, TOTAL - 1, id="one-hot with less than all counts"),
    ],
)
def test_a_token_that_q_cannot_have_given_is_a_lie(ids, counts, drawn, own):
    """Guards safety: a declared q that is not the sampled one would bias the text, so the draft must be found out."""
    assert verdict(ids, counts, drawn, own) is Cut.LYING_DRAFT


def test_a_support_that_runs_past_its_column_is_malformed():
    """Guards truncated columns: slots before the break stay good, the broken one and those behind it are cut."""
    cuts = check_slots(
        support_sizes=np.array([2, 3, 1, 0], np.uint16),
        q_ids=np.array([1, 2, 5, 6], np.uint32),
        q_counts_minus_one=np.array([0, TOTAL - 2, 0, TOTAL - 2], np.uint16),
        draft_ids=np.array([1, 5, 8, 3], np.uint32),
        own_counts_minus_one=np.array([0, 0, TOTAL - 1, TOTAL - 1], np.uint16),
    )
    assert cuts.tolist() == [Cut.NONE, Cut.MALFORMED_Q, Cut.MALFORMED_Q, Cut.NONE]


@given(st.lists(st.tuples(ROW, st.integers(0, TOTAL - 1)), max_size=6))
def test_what_the_draft_builds_is_what_the_target_passes(cases):
    """Guards the pair of ends: every quantised and drawn slot must be judged honest."""
    rows = [quantise(np.array(list(row)), np.array(list(row.values()))) for row, _ in cases]
    indices = draw_rows(rows, np.array([bits for _, bits in cases], np.uint32))
    cuts = check_slots(
        support_sizes=np.array([len(row.ids) for row in rows], np.uint16),
        q_ids=np.concatenate([np.empty(0, np.uint32), *(row.ids for row in rows)]),
        q_counts_minus_one=(np.concatenate([np.empty(0, np.uint32), *(row.counts for row in rows)]) - 1).astype(
            np.uint16
        ),
        draft_ids=np.array([row.ids[i] for row, i in zip(rows, indices, strict=True)], np.uint32),
        own_counts_minus_one=np.array([row.counts[i] - 1 for row, i in zip(rows, indices, strict=True)], np.uint16),
    )
    assert not cuts.any()
