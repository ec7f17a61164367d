"""Keyed randomness: every random word is a pure function of (key, position in the text, role).

There is no generator and no state, so a retry, another replica or another batch draws the same words, and no word ever
serves two purposes. The words come from Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) with these counter words:

====  ==============================================  ==============================================
word  uniform draws (rule ``standard``)               rows of Gumbel noise (rule ``coupled``)
====  ==============================================  ==============================================
c0    0                                               0
c1    committed length at the start of the round      absolute position of the token, prompt included
c2    slot + 2^16 x sample index                      2^16 x sample index
c3    role                                            role
====  ==============================================  ==============================================

Slots and sample indices must be below 2^16. The recovered candidates and the bonus of one round share the ``EMIT`` word
of slot 0, because exactly one of them is ever looked at; draft and accept words are drawn per slot.

Philox separates the roles; it is not cryptography. A part that holds one subkey cannot read another part's noise off
it, but a seed that a client chose can be guessed like any short secret.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]
Word = U32 | np.uint32

_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_PHILOX_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint32)
# Keeps the counters that derive subkeys apart from the counters that draw words, whatever the keys are.
_SUBKEY_DOMAIN = 1 << 31


class Role(IntEnum):
    """What a word is for; each role has a subkey of its own and its own counter word."""

    DRAFT = 1  # the draft draws x_i
    ACCEPT = 2  # the coordinator tests x_i
    EMIT = 3  # the target draws the recovered candidates and the bonus
    GUMBEL = 4  # both sides, for the coupled rule


def philox4x32(counter: tuple[Word, Word, Word, Word], key: U64) -> tuple[U32, U32, U32, U32]:
    """Philox-4x32-10, vectorised over n blocks.

    Args:
        counter: four words, each uint32[n] or a uint32 scalar.
        key: uint64[n]; the low half is key word 0, the high half key word 1.

    Returns:
        Four words of 32 random bits, each uint32[n].
    """
    key = np.asarray(key, np.uint64)
    even, odd = np.empty((2, 2, len(key)), np.uint64)
    even[0], odd[0], even[1], odd[1] = counter
    round_key = np.empty((2, len(key)), np.uint32)
    round_key[0], round_key[1] = key & _LOW_32, key >> _SHIFT_32
    for _ in range(_PHILOX_ROUNDS):
        # Row 0 multiplies c0 and row 1 multiplies c2; the products change places, hence the reversal.
        product = (even * _PHILOX_MULTIPLIERS)[::-1]
        even = (product >> _SHIFT_32) ^ odd ^ round_key
        odd = product & _LOW_32
        round_key += _PHILOX_WEYL
    (w0, w2), (w1, w3) = even.astype(np.uint32), odd.astype(np.uint32)
    return w0, w1, w2, w3


def subkey(seed: int, role: Role) -> int:
    """The 64-bit key of one role: half of a Philox block keyed by the request's seed, with the role as counter.

    The other half of the block is dropped, so a subkey does not determine the seed by inversion.

    Args:
        seed: the request's seed, taken modulo 2^64, so that negative seeds are legal.
        role: which key.
    """
    zero = np.uint32(0)
    counter = (zero, zero, zero, np.uint32(_SUBKEY_DOMAIN + role))
    w0, w1, _, _ = philox4x32(counter, np.array([seed & (2**64 - 1)], np.uint64))
    return int(w0[0]) | int(w1[0]) << 32


def uniforms(keys: U64, starts: U32, slots: U32, sample_indices: U32, role: Role) -> F64:
    """One uniform per draw, on the 2^53 multiples of 2^-53 in [0, 1).

    Args:
        keys: uint64[n] subkeys of ``role``.
        starts: uint32[n] committed length at the start of the round.
        slots: uint32[n] slot in the round, below 2^16 (0 for ``EMIT``).
        sample_indices: uint32[n] index among the samples of one request, below 2^16.
        role: what the draw is for.
    """
    w0, w1 = _block(keys, starts, slots, sample_indices, role)[:2]
    return ((w0 >> np.uint32(5)) * 2.0**26 + (w1 >> np.uint32(6))) * 2.0**-53


def sixteen_bits(keys: U64, starts: U32, slots: U32, sample_indices: U32, role: Role) -> U32:
    """One integer of [0, 65536) per draw, uint32[n], to draw against integer counts; arguments as in ``uniforms``."""
    return _block(keys, starts, slots, sample_indices, role)[0] >> np.uint32(16)


def gumbel_row_keys(keys: U64, positions: U32, sample_indices: U32) -> U64:
    """The key of one row of Gumbel noise per position, uint64[n].

    Args:
        keys: uint64[n] subkeys of role ``GUMBEL``.
        positions: uint32[n] absolute position of the token to be chosen, prompt included.
        sample_indices: uint32[n], below 2^16.
    """
    slot = np.zeros(len(keys), np.uint32)
    w0, w1 = _block(keys, positions, slot, sample_indices, Role.GUMBEL)[:2]
    return w0 | w1.astype(np.uint64) << _SHIFT_32


def gumbel_words(row_keys: U64, token_ids: NDArray[np.integer]) -> U32:
    """A 32-bit word for each (row, token): uint32[n, k] from uint64[n] row keys and k token ids.

    For fixed keys this is a bijection of the 32-bit integers (two rounds of xor-shift and multiply; the constants are
    those of Wellons' ``lowbias32``, hash-prospector, public domain). With lo and hi the halves of the row key and t the
    token id, everything modulo 2^32 and ``>>`` shifting in zeros::

        h = t ^ lo
        h = (h ^ h >> 16) * 0x7feb352d
        h = h ^ hi
        h = (h ^ h >> 15) * 0x846ca68b
        w = h ^ h >> 16

    In signed 64-bit arithmetic (torch) the same integers come from masking with 0xffffffff after each product; writing
    the second factor as 0x846ca68b - 2^32 = -0x7b935975 keeps both products inside 63 bits.
    """
    row_keys = np.asarray(row_keys, np.uint64)[:, None]
    h = np.asarray(token_ids).astype(np.uint32) ^ row_keys.astype(np.uint32)
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x7FEB352D)
    h ^= (row_keys >> _SHIFT_32).astype(np.uint32)
    h = (h ^ h >> np.uint32(15)) * np.uint32(0x846CA68B)
    return h ^ h >> np.uint32(16)


def exponentials(words: U32) -> F64:
    """Unit exponential variates from 32-bit words: e = -log1p(-v), v = ((w & 0x7fffffff) + 1/2) 2^-31.

    v lies strictly inside (0, 1), so e is never zero, infinite or NaN: 2.3e-10 <= e <= 22.2. Small e wins, and log1p
    keeps it to full precision; -log(u) near u = 1 would round it to zero.
    """
    v = ((words & np.uint32(0x7FFFFFFF)) + 0.5) * 2.0**-31
    return -np.log1p(-v)


def coupled_choice(probs: NDArray[np.floating], row_keys: U64) -> NDArray[np.int64]:
    """The token of each row under shared Gumbel noise: argmax_t p_t / e_t, which has law p (the Gumbel-max trick).

    Args:
        probs: [n, vocab] finite weights, at least one positive per row; they need not be normalised.
        row_keys: uint64[n] from ``gumbel_row_keys``.

    Returns:
        int64[n] token ids of positive weight; ties go to the lowest id.
    """
    noise = exponentials(gumbel_words(row_keys, np.arange(probs.shape[1])))
    return np.argmax(probs / noise, axis=1)


def _block(keys: U64, starts: U32, slots: U32, sample_indices: U32, role: Role) -> tuple[U32, U32, U32, U32]:
    """The Philox block of each draw; the counter words are those of the table above."""
    c2 = np.asarray(slots, np.uint32) + (np.asarray(sample_indices, np.uint32) << np.uint32(16))
    counter = (np.uint32(0), np.asarray(starts, np.uint32), c2, np.uint32(role))
    return philox4x32(counter, keys)
