"""Exact laws by enumeration: every combination of noise on a grid, run through the production functions.

A `World` is a Markov target and draft whose thresholds (p / q, and the steps of every distribution function) all lie on
multiples of 1 / grid. The functions under test are then constant between grid lines, so running each grid point once
gives the law of a round as exact fractions, and a comparison with p is an equality, not a statistical test.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.distribution import TOTAL, draw_rows, quantise
from outrider.rule import accepted_counts, inverse_cdf, residual

Law = dict[tuple[int, ...], Fraction]
Ints = NDArray[np.int64]
Lengths = Callable[[Ints], Ints]
"""How many drafted slots are kept, from [n, gamma + 1] contexts (the token before each row)."""


class World(NamedTuple):
    """Markov tables: row s of p and q is the law of the token after s, [vocab, vocab]."""

    p: NDArray[np.float64]
    q: NDArray[np.float64]


class Rounds(NamedTuple):
    """One round per grid point: contexts [n, gamma + 1], kept slots [n], noise, and what was emitted."""

    contexts: Ints
    kept: Ints
    accept_u: NDArray[np.float64]
    emit_u: NDArray[np.float64]
    accepted: Ints
    tokens: Ints

    def law(self) -> Law:
        """The law of the emitted tokens (accepted prefix + the last token)."""
        outcomes = np.concatenate((self.contexts[:, 1:], np.full((len(self.kept), 1), -1)), axis=1)
        columns = np.arange(outcomes.shape[1])
        outcomes = np.where(columns < self.accepted[:, None], outcomes, -1)
        outcomes[np.arange(len(outcomes)), self.accepted] = self.tokens
        distinct, counts = np.unique(outcomes, axis=0, return_counts=True)
        return {
            tuple(int(t) for t in row if t >= 0): Fraction(int(count), len(outcomes))
            for row, count in zip(distinct, counts, strict=True)
        }


def on_grid(p: NDArray[np.float64], q: NDArray[np.float64], grid: int) -> bool:
    """Whether accept thresholds, the draws from p and q, and the residual's draws all step on multiples of 1 / grid."""
    steps = [np.cumsum(p), np.cumsum(q), np.minimum(1, p[q > 0] / q[q > 0])]
    left = np.maximum(p - q, 0)
    if left.any():
        steps.append(np.cumsum(left) / left.sum())
    return all(float(step * grid).is_integer() for step in np.concatenate(steps))


def make_world(vocab: int, grid: int, seed: int, draft: str = "sampled") -> World:
    """A random world on the grid; `draft` is "sampled", or "one-hot" for a deterministic draft."""
    rng = np.random.default_rng(seed)
    compositions = [row for row in product(range(grid + 1), repeat=vocab) if sum(row) == grid]
    rows = np.array(compositions) / grid

    def row_pair() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        while True:
            p = rows[rng.integers(len(rows))]
            q = np.eye(vocab)[rng.integers(vocab)] if draft == "one-hot" else rows[rng.integers(len(rows))]
            if on_grid(p, q, grid) and p.max() < 1 and (q.max() == 1) == (draft == "one-hot"):
                return p, q

    p, q = zip(*(row_pair() for _ in range(vocab)), strict=True)
    return World(np.array(p), np.array(q))


def sparse_rounds(world: World, start: int, gamma: int, grid: int, keep: Lengths | None = None) -> Rounds:
    """The sparse form split as in service (draft / target / coordinator), for every grid point of the noise."""
    noise = np.indices((grid,) * (2 * gamma + 1)).reshape(2 * gamma + 1, -1)
    bits16 = noise[:gamma].T * (TOTAL // grid)
    accept_u, emit_u = noise[gamma : 2 * gamma].T / grid, noise[-1] / grid
    n, vocab = len(emit_u), len(world.p)

    # Draft: x_i from integer counts.
    rows = [quantise(np.arange(vocab), q) for q in world.q]
    contexts = np.full((n, gamma + 1), start)
    own_counts = np.zeros((n, gamma), np.int64)
    for i in range(gamma):
        for state, row in enumerate(rows):
            here = contexts[:, i] == state
            index = draw_rows([row] * int(here.sum()), bits16[here, i])
            contexts[here, i + 1], own_counts[here, i] = row.ids[index], row.counts[index]
    kept = np.full(n, gamma) if keep is None else keep(contexts)

    # Target: p(x), a recovered candidate for every slot, and the bonus of the row behind the last kept slot.
    p_x = world.p[contexts[:, :-1], contexts[:, 1:]].astype(np.float32)
    candidates = [inverse_cdf(residual(world.p[c], world.q[c]), emit_u) for c in contexts[:, :-1].T]
    bonus = inverse_cdf(world.p[contexts[np.arange(n), kept]], emit_u)

    # Coordinator: compare, take the candidate of the first rejected slot.
    sent = np.arange(gamma) < kept[:, None]
    accepted = accepted_counts(p_x[sent], own_counts[sent], accept_u[sent], kept)
    looked_at = np.stack([*candidates, bonus])[np.minimum(accepted, gamma), np.arange(n)]
    tokens = np.where(accepted < kept, looked_at, bonus)
    return Rounds(contexts, kept, accept_u, emit_u, accepted, tokens)


def bias(law: Mapping[tuple[int, ...], Fraction], p: NDArray[np.float64], start: int) -> Fraction:
    """Total variation between a law of token runs and plain sampling, the shorter runs completed by plain sampling."""
    length = max(len(run) for run in law)
    vocab = range(len(p))
    plain: Law = {(): Fraction(1)}
    completed: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for size in range(length + 1):
        for run, chance in law.items():
            if len(run) == size:
                completed[run] += chance
        if size < length:
            plain = {(*run, t): chance * _step(p, start, run, t) for run, chance in plain.items() for t in vocab}
            for run in [run for run in completed if len(run) == size]:
                chance = completed.pop(run)
                for t in vocab:
                    completed[(*run, t)] += chance * _step(p, start, run, t)
    return sum((abs(completed.get(run, Fraction(0)) - chance) for run, chance in plain.items()), Fraction(0)) / 2


def _step(p: NDArray[np.float64], start: int, run: tuple[int, ...], token: int) -> Fraction:
    return Fraction(float(p[run[-1] if run else start, token]))
