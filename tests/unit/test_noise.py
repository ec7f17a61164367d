"""Keyed noise: known answers, separation of what must differ, uniformity of what must be uniform."""

import numpy as np
import pytest

from outrider.noise import (
    Role,
    coupled_choice,
    exponentials,
    gumbel_row_keys,
    gumbel_words,
    philox4x32,
    sixteen_bits,
    subkey,
    uniforms,
)

GOLDEN_SUBKEYS = [3199665240036377093, 12016535731105929972, 17646373196398070711, 14024777538668367282]
GOLDEN_UNIFORM = 0.3780293613533072
GOLDEN_WORDS = [[2388276939, 293961042, 2366734693], [2328141752, 1704733129, 3475553529]]


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def some_row_keys(n: int, seed: int = 3) -> np.ndarray:
    keys = np.full(n, subkey(seed, Role.GUMBEL), np.uint64)
    return gumbel_row_keys(keys, np.arange(n, dtype=np.uint32), np.zeros(n, np.uint32))


def chi_square(observed: np.ndarray, expected: np.ndarray | float) -> float:
    """Standard deviations by which the chi-square statistic exceeds its mean."""
    degrees = observed.size - 1
    return float(((observed - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees)


def test_philox_gives_the_known_answers_of_random123():
    """Guards the generator itself: the three published vectors for Philox-4x32-10, in one vectorised call."""
    counter = (
        u32(0, 0xFFFFFFFF, 0x243F6A88),
        u32(0, 0xFFFFFFFF, 0x85A308D3),
        u32(0, 0xFFFFFFFF, 0x13198A2E),
        u32(0, 0xFFFFFFFF, 0x03707344),
    )
    words = np.stack(philox4x32(counter, u64(0, 0xFFFFFFFFFFFFFFFF, 0x299F31D0A4093822)), axis=1)
    assert words.tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]


def test_the_counter_words_are_the_documented_ones():
    """Guards reproducibility in other implementations: position, slot, sample index and role in their words."""
    w0, w1, _, _ = philox4x32((u32(0), u32(700), u32(3 + (2 << 16)), u32(Role.ACCEPT)), u64(99))
    args = (u64(99), u32(700), u32(3), u32(2), Role.ACCEPT)
    assert uniforms(*args)[0] == ((int(w0[0]) >> 5) * 2**26 + (int(w1[0]) >> 6)) / 2**53
    assert sixteen_bits(*args)[0] == int(w0[0]) >> 16
    w0, w1, _, _ = philox4x32((u32(0), u32(700), u32(2 << 16), u32(Role.GUMBEL)), u64(99))
    assert int(gumbel_row_keys(u64(99), u32(700), u32(2))[0]) == int(w0[0]) | int(w1[0]) << 32


def test_a_draw_does_not_depend_on_the_draws_beside_it():
    """Guards batching: the same key and place give the same word alone and in any batch."""
    keys, n = u64(*range(5)), 5
    starts, slots, samples = (np.arange(n, dtype=np.uint32) * k for k in (7, 1, 2))
    together = uniforms(keys, starts, slots, samples, Role.EMIT)
    alone = [
        uniforms(keys[i : i + 1], starts[i : i + 1], slots[i : i + 1], samples[i : i + 1], Role.EMIT)[0]
        for i in range(n)
    ]
    assert together.tolist() == alone


def test_no_two_places_share_a_word():
    """Guards the two-purpose fault: seeds, roles, positions, slots and samples all change the word."""
    drawn = set()
    for seed in (0, 1, 2**63, -1):
        for role in Role:
            keys = np.full(60, subkey(seed, role), np.uint64)
            start, slot, sample = (a.astype(np.uint32) for a in np.unravel_index(np.arange(60), (4, 5, 3)))
            drawn.update(uniforms(keys, start, slot, sample, role).tolist())
    assert len(drawn) == 4 * 4 * 60


def test_a_subkey_is_not_the_seed_and_differs_by_role():
    """Guards that a service holding one role's key holds neither the seed nor another role's key."""
    keys = {subkey(seed, role) for seed in range(50) for role in Role}
    assert len(keys) == 200
    assert not keys & set(range(50))
    assert subkey(-1, Role.DRAFT) == subkey(2**64 - 1, Role.DRAFT)


def test_seeds_keep_their_meaning():
    """Guards users' seeds across releases: these values may only change together with the noise version."""
    assert [subkey(7, role) for role in Role] == GOLDEN_SUBKEYS
    assert uniforms(u64(subkey(7, Role.EMIT)), u32(10), u32(0), u32(0), Role.EMIT)[0] == GOLDEN_UNIFORM
    assert gumbel_words(some_row_keys(2, seed=7), np.arange(3)).tolist() == GOLDEN_WORDS


def test_uniforms_are_uniform_and_roles_are_independent():
    """Guards the law of the draws: cells of one role, and pairs of cells of two roles at the same place."""
    n = 100_000
    starts, zeros = np.arange(n, dtype=np.uint32), np.zeros(n, np.uint32)
    draft, accept = (
        uniforms(np.full(n, subkey(1, role), np.uint64), starts, zeros, zeros, role)
        for role in (Role.DRAFT, Role.ACCEPT)
    )
    assert draft.min() >= 0
    assert draft.max() < 1
    assert abs(chi_square(np.histogram(draft, 256, (0, 1))[0], n / 256)) < 4
    assert abs(chi_square(np.histogram2d(draft, accept, 16, [[0, 1], [0, 1]])[0], n / 256)) < 4


def test_gumbel_words_follow_the_documented_formula_in_signed_64_bit_arithmetic():
    """Guards twins in other libraries: the formula in int64, products kept inside 63 bits, gives the same integers."""
    row_keys = np.concatenate((some_row_keys(50), u64(0, 2**64 - 1)))
    ids = np.array([0, 1, 2, 49_151, 151_935, 2**31 - 1])
    lo = (row_keys & u64(0xFFFFFFFF)).astype(np.int64)[:, None]
    hi = (row_keys >> u64(32)).astype(np.int64)[:, None]
    h = ids.astype(np.int64) ^ lo
    h = ((h ^ h >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    h = h ^ hi
    h = ((h ^ h >> 15) * -0x7B935975) & 0xFFFFFFFF
    assert np.array_equal(gumbel_words(row_keys, ids), h ^ h >> 16)


def test_gumbel_words_of_a_row_never_collide():
    """Guards ties: within a row the hash is a bijection, so no two ids share a word."""
    words = gumbel_words(some_row_keys(1), np.arange(200_000))[0]
    assert len(np.unique(words)) == 200_000


@pytest.mark.parametrize("bits", [slice(0, 8), slice(8, 16), slice(16, 24), slice(23, 31)])
def test_gumbel_words_are_uniform_along_rows_and_along_ids(bits):
    """Guards every byte of the hash, both for many ids of one row and for one id over many rows."""
    shift, size = bits.start, 1 << (bits.stop - bits.start)
    for words in (gumbel_words(some_row_keys(1), np.arange(200_000)), gumbel_words(some_row_keys(200_000), u32(17))):
        cells = np.bincount((words.ravel() >> np.uint32(shift)) % size, minlength=size)
        assert abs(chi_square(cells, words.size / size)) < 4


@pytest.mark.parametrize("step", [1, 2, 3, 4, 16, 256, 4096, 65_536])
def test_gumbel_words_show_no_serial_correlation(step):
    """Guards pairs of ids of one row and of neighbouring rows, where the ids differ little: plain and in the tail.

    The tail matters most: a token wins by a small exponential, so two ids must not be small together.
    """
    words = gumbel_words(some_row_keys(100_000), np.array([8, 8 + step])) & np.uint32(0x7FFFFFFF)
    for a, b in ((words[:, 0], words[:, 1]), (words[1:, 0], words[:-1, 1])):
        cells = np.bincount((a >> np.uint32(27)) * 16 + (b >> np.uint32(27)), minlength=256)
        assert abs(chi_square(cells, len(a) / 256)) < 4
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(len(a))
        both_small = np.count_nonzero((a < 2**26) & (b < 2**26))
        assert abs(both_small - len(a) / 1024) < 4 * np.sqrt(len(a) / 1024)


def test_exponentials_are_finite_and_positive_at_the_ends():
    """Guards the grid's ends, where log(0) or a rounded 1 would give infinities, zeros or NaN."""
    e = exponentials(u32(0, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF))
    assert e.tolist() == [e[0], e[1], e[0], e[1]]
    assert 2.3e-10 < e[0] < 2.4e-10
    assert 22 < e[1] < 22.3


def test_a_rare_token_wins_as_often_as_it_should():
    """Guards small probabilities: p = 1e-8 beats a noise of 1 with chance 1e-8, not with a multiple of it."""
    winning_words = np.count_nonzero(exponentials(np.arange(1000, dtype=np.uint32)) < 1e-8)
    assert winning_words * 2.0**-31 == pytest.approx(1e-8, rel=0.03)


@pytest.mark.parametrize("p", [[0.5, 0.3, 0.2], [0.9, 0.0, 0.0999, 0.0001], [0.125] * 8])
def test_coupled_choice_has_law_p(p):
    """Guards the plain sampler of the coupled rule: 200,000 rows at this size detect a total variation of 0.005."""
    n, p = 200_000, np.array(p)
    counts = np.bincount(coupled_choice(np.tile(p, (n, 1)), some_row_keys(n)), minlength=len(p))
    assert counts[p == 0].sum() == 0
    assert abs(chi_square(counts[p > 0], n * p[p > 0])) < 4


def test_coupled_choice_of_a_one_hot_row_is_that_token_and_scale_does_not_matter():
    """Guards temperature 0 under the coupled rule, and rows that do not sum to 1."""
    keys = some_row_keys(30)
    assert set(coupled_choice(np.tile([0.0, 1e-30, 0.0], (30, 1)), keys)) == {1}
    row = np.tile([0.2, 0.3, 0.5], (30, 1))
    assert np.array_equal(coupled_choice(row, keys), coupled_choice(row * 0.25, keys))
