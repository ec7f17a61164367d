"""Acceptance from counted rounds, with intervals.

Two figures, which differ where a draft does not always propose (lookup drafts): alpha = accepted / tested says how good
the proposals are; the acceptance by position counts a round without a proposal as one that was rejected at once, which
is what the improvement depends on. Under the standard rule alpha estimates E[sum min(p, q)] without bias, because that
sum is the chance that a tested token is accepted (Leviathan et al., arXiv 2211.17192, theorem 3.5).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from loadtest.bootstrap import Interval
from loadtest.evaluation.reading import Reading

_Z = 1.959964
"""Two-sided 95 % of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of many rounds.

    Attributes:
        reached: by position, rounds that accepted everything before it and could have drafted so far.
        accepted: by position, those of them that accepted it too.
        tested, accepted_tokens: over all positions; slots that were proposed only.
        drafts: rounds that proposed anything, of `rounds`.
    """

    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    tested: int
    accepted_tokens: int
    drafts: int
    rounds: int

    @property
    def alpha(self) -> float:
        """Accepted over tested; 0 where nothing was tested."""
        return self.accepted_tokens / self.tested if self.tested else 0.0

    @property
    def by_position(self) -> list[float]:
        """s_1, s_2, ...: acceptance given that all before was accepted; 0 behind the last position ever reached."""
        return [got / of if of else 0.0 for got, of in zip(self.accepted, self.reached, strict=True)]

    def as_json(self) -> dict[str, Any]:
        return {
            "alpha": round(self.alpha, 4),
            "alpha_interval": _rounded(wilson(self.accepted_tokens, self.tested)),
            "tested": self.tested,
            "acceptance_per_position": [round(value, 4) for value in self.by_position],
            "per_position_intervals": [
                _rounded(wilson(got, of)) for got, of in zip(self.accepted, self.reached, strict=True)
            ],
            "drafted_rounds": round(self.drafts / self.rounds, 4) if self.rounds else 0.0,
        }


def count(readings: Iterable[Reading], depth: int) -> Acceptance:
    """Of speculative answers, whatever their gamma: a position counts only where gamma reached so far."""
    reached, accepted = [0] * depth, [0] * depth
    own = [reading for reading in readings if reading.gamma]
    for reading in own:
        for got in reading.accepted:
            for position in range(min(reading.gamma, got + 1)):
                reached[position] += 1
                accepted[position] += position < got
    return Acceptance(
        tuple(reached),
        tuple(accepted),
        sum(reading.tested for reading in own),
        sum(reading.accepted_tokens for reading in own),
        sum(reading.drafts for reading in own),
        sum(reading.rounds for reading in own),
    )


def wilson(hits: int, trials: int) -> Interval:
    """Wilson's 95 % interval of a share; all of [0, 1] where nothing was tried."""
    if not trials:
        return Interval(0.0, 1.0)
    share, square = hits / trials, _Z * _Z
    middle = share + square / (2 * trials)
    half = _Z * math.sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    scale = 1 + square / trials
    return Interval(max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


def _rounded(interval: Interval) -> list[float]:
    return [round(interval.low, 4), round(interval.high, 4)]
