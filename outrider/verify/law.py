"""Do two sets of answers come from one law? Chi-square tests of homogeneity on their first three tokens.

The first token is always drawn plainly; the second and third are where drafted tokens are accepted and rejected. Each
test looks at the same answers in another way, at its share of the level:

- (t1, t2): what happens in the first slot. Any wrong acceptance moves this law, if only few outcomes are likely.
- (t1, t2, t3): what only happens behind an accepted or a recovered token.
- t2 by its id: draws run through the ids in order, so noise that serves two draws moves ids up or down, behind every t1
  alike, even where no outcome comes twice.
- (t1, t2) by how often it comes: a q that was not the sampled one, and tokens dropped for their q, make likely outcomes
  likelier, behind every t1 alike.

Rare outcomes are pooled, child by child into their parent, until each cell holds enough of both sets together. Whatever
forms cells looks at the union only, never at which set an outcome came from, so under one law the p-value is uniform.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from outrider.verify import chi2

LEVEL = 0.001
"""A p-value below it fails: one honest run in a thousand does."""
POWER = 0.95
MOST_CELLS = 64
_LEAST_PER_CELL = 10
"""Outcomes of both sets together in a cell, so that the chi-square law is a good approximation (5 expected of each)."""
_LENGTH = 3
"""Tokens of an answer that are looked at."""
_ID_RANGES = 16

Tokens = tuple[int, ...]
Sets = Sequence[Sequence[Tokens]]


class Law(NamedTuple):
    """What the test found.

    Attributes:
        p_value: of all tests together; the chance of so large a difference under one law.
        tv: total variation between the two sets of (t1, t2, t3), in the pooled cells. Under one law it is not 0 but
            about sqrt(cells / (pi n)).
        detectable_tv: from this total variation on a difference is found with probability `POWER`, wherever it lies.
        samples: in each set, the smaller one.
    """

    p_value: float
    tv: float
    detectable_tv: float
    samples: int

    @property
    def equal(self) -> bool:
        """Whether the two sets may come from one law."""
        return self.p_value >= LEVEL


def compare(plain: Sequence[Sequence[int]], speculative: Sequence[Sequence[int]]) -> Law:
    """Tests two sets of answers, each of at least three tokens and drawn independently of all others.

    Raises:
        ValueError: a set is empty, or an answer is too short.
    """
    sets = [[tuple(answer[:_LENGTH]) for answer in answers] for answers in (plain, speculative)]
    if not all(sets) or any(len(answer) < _LENGTH for answers in sets for answer in answers):
        raise ValueError(f"both sets need answers, of at least {_LENGTH} tokens")
    n = len(sets[0]) * len(sets[1]) / (len(sets[0]) + len(sets[1]))
    counts = count(sets)
    p_value = min(homogeneity(counts), *(homogeneity(count(view)) for view in views(sets)))
    df = max(len(counts) - 1, 1)
    needed = chi2.noncentrality(df, LEVEL / _TESTS, POWER)
    return Law(
        p_value=min(_TESTS * p_value, 1.0),
        tv=sum(abs(a / len(sets[0]) - b / len(sets[1])) for a, b in counts) / 2,
        # Cauchy-Schwarz: of all differences with this total variation, one in proportion to p moves the statistic
        # least, by n sum (a - b)^2 / p = 4 n TV^2.
        detectable_tv=min(math.sqrt(needed / (4 * n)), 1.0),
        samples=min(len(sets[0]), len(sets[1])),
    )


def views(sets: Sets) -> list[Sets]:
    """The outcomes of the other tests, each made from an answer and the union of both sets."""
    pairs = [[answer[:2] for answer in answers] for answers in sets]
    ids = sorted(pair[1] for answers in pairs for pair in answers)
    bounds = sorted({ids[len(ids) * part // _ID_RANGES] for part in range(1, _ID_RANGES)})
    seen = Counter(pair for answers in pairs for pair in answers)
    return [
        pairs,
        [[(bisect(bounds, pair[1]),) for pair in answers] for answers in pairs],
        [[(seen[pair].bit_length(),) for pair in answers] for answers in pairs],
    ]


_TESTS = 4
"""The answers themselves, and the views of them."""


def count(sets: Sets) -> list[tuple[int, int]]:
    """How often each cell occurs in the one and in the other set."""
    least = max(_LEAST_PER_CELL, sum(map(len, sets)) // MOST_CELLS)
    cell = pool(Counter(outcome for answers in sets for outcome in answers), least)
    one, other = (Counter(cell[outcome] for outcome in answers) for answers in sets)
    return [(one[name], other[name]) for name in sorted(one | other)]


def pool(outcomes: Counter[Tokens], least: int) -> dict[Tokens, Tokens]:
    """The cell of each outcome: itself, or, where it is rarer than `least`, all that is rare below its prefix."""
    cell = {outcome: outcome for outcome in outcomes}
    for length in range(max(map(len, outcomes)), 0, -1):
        sizes = _sizes(cell, outcomes)
        for outcome, name in cell.items():
            if len(name) == length and sizes[name] < least:
                cell[outcome] = name[:-1]
    sizes = _sizes(cell, outcomes)
    if 0 < sizes[()] < least and len(sizes) > 1:  # what is left over joins the smallest cell
        smallest = min((name for name in sizes if name), key=lambda name: (sizes[name], name))
        cell = {outcome: name or smallest for outcome, name in cell.items()}
    return cell


def homogeneity(counts: Sequence[tuple[int, int]]) -> float:
    """Pearson's p-value that both columns come from one law."""
    totals = [sum(column) for column in zip(*counts, strict=True)]
    statistic = 0.0
    for row in counts:
        for observed, total in zip(row, totals, strict=True):
            expected = sum(row) * total / sum(totals)
            statistic += (observed - expected) ** 2 / expected
    return chi2.survival(statistic, len(counts) - 1) if len(counts) > 1 else 1.0


def _sizes(cell: dict[Tokens, Tokens], outcomes: Counter[Tokens]) -> Counter[Tokens]:
    sizes: Counter[Tokens] = Counter()
    for outcome, name in cell.items():
        sizes[name] += outcomes[outcome]
    return sizes
