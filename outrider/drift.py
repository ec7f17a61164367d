"""Whether a pair's acceptance has dropped below what it was: a CUSUM over blocks of rounds.

What is looked at is whether the first drafted token of a round was accepted: unlike the accepted length, that does not
depend on gamma, which changes by itself. Rounds of one answer resemble each other, so single rounds are no independent
samples; the mean over a block of `BLOCK_ROUNDS` rounds, which holds many answers, nearly is. How much block means vary
is learnt from the traffic itself, together with their mean mu.

With z = (mu - block mean) / sd, the statistic of Page's test is S <- max(0, S + z - SLACK); it raises the alarm at
S >= LIMIT (Page, "Continuous inspection schemes", 1954). Run lengths are Siegmund's approximation ("Sequential
Analysis", 1985, with 1.166 for the overshoot): `run_length`.

- False alarms: once in about 800,000 blocks if mu and sd were known. Both are learnt from `LEARN_BLOCKS` blocks, and
  mu with an error of 0.1 sd; at twice that in the bad direction it is once in about 39,000 blocks. Over all outcomes of
  the learning, 1% of servers have a false alarm within 256,000 rounds, and 3.4% within a million (simulated).
- Delay: a drop by 2 sd is seen after 7 blocks on average, by 3 sd after 4 (1,000 rounds). An sd is about 3 points of
  acceptance where answers are short and many (p = 0.7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK_ROUNDS = 256
LEARN_BLOCKS = 100
SLACK = 0.75
"""Drops by less than this many sd are never seen, for they do not matter, and mu is not known better."""
LIMIT = 8.0

_EXTREME = 0.02
"""Shares nearer to 0 or 1 than this are taken for this when their least variance is worked out."""
_GIVEN_SPREAD = 2.0
"""sd of block means over that of independent rounds, assumed where mu is given and nothing was learnt."""
_NEWEST = 0.2
_OVERSHOOT = 1.166


class Baseline(NamedTuple):
    """What block means were when all was well.

    Attributes:
        mean: share of rounds whose first drafted token was accepted.
        sd: standard deviation of block means around it.
    """

    mean: float
    sd: float


class Known(NamedTuple):
    """What is known of the blocks of a baseline so far (Welford): their number, mean, and sum of squared deviations."""

    blocks: int = 0
    mean: float = 0.0
    squares: float = 0.0


class View(NamedTuple):
    """What there is to show.

    Attributes:
        baseline: None while it is being learnt.
        recent: running mean of the latest blocks; None before the first after the baseline.
        drifted: whether the alarm is raised.
    """

    baseline: float | None
    recent: float | None
    drifted: bool

    @property
    def drop(self) -> float:
        """By how much less is accepted than at the baseline; negative: more. 0 while that is not known."""
        return 0.0 if self.baseline is None or self.recent is None else self.baseline - self.recent


def independent_sd(mean: float) -> float:
    """Standard deviation of a block's mean if its rounds were independent: sqrt(p (1 - p) / BLOCK_ROUNDS)."""
    share = min(max(mean, _EXTREME), 1 - _EXTREME)
    return math.sqrt(share * (1 - share) / BLOCK_ROUNDS)


def given(mean: float) -> Baseline:
    """A baseline of which only the mean is known."""
    return Baseline(mean, _GIVEN_SPREAD * independent_sd(mean))


def learn(known: Known, block_mean: float) -> Known:
    """Adds a block to what is known."""
    blocks = known.blocks + 1
    off = block_mean - known.mean
    mean = known.mean + off / blocks
    return Known(blocks, mean, known.squares + off * (block_mean - mean))


def learnt(known: Known) -> Baseline:
    """The baseline of at least two blocks; never surer than independent rounds would make it."""
    return Baseline(known.mean, max(math.sqrt(known.squares / (known.blocks - 1)), independent_sd(known.mean)))


def step(statistic: float, baseline: Baseline, block_mean: float) -> float:
    """S after one more block, capped at `LIMIT` so that an alarm ends soon after its cause does."""
    z = (baseline.mean - block_mean) / baseline.sd
    return min(max(0.0, statistic + z - SLACK), LIMIT)


def run_length(drop_sd: float) -> float:
    """Blocks until the alarm, on average, when the true mean lies `drop_sd` sd below the baseline's."""
    drift, limit = drop_sd - SLACK, LIMIT + _OVERSHOOT
    if abs(drift) < 1e-9:
        return limit * limit
    return (math.exp(-2 * drift * limit) + 2 * drift * limit - 1) / (2 * drift * drift)


@dataclass(slots=True)
class Drift:
    """The test over a server's rounds: a handful of numbers, whatever the traffic.

    Attributes:
        baseline: given, or None until it is learnt from the first `LEARN_BLOCKS` blocks.
        drifted: the alarm: raised when S reaches `LIMIT`, over when it is back at 0.
    """

    baseline: Baseline | None = None
    drifted: bool = False
    _rounds: int = 0
    _accepted: int = 0
    _known: Known = field(default_factory=Known)
    _statistic: float = 0.0
    _recent: float | None = None

    def add(self, accepted: bool) -> bool:
        """Adds a round; True if that ended a block, so that there is something new to see."""
        self._rounds += 1
        self._accepted += accepted
        if self._rounds < BLOCK_ROUNDS:
            return False
        mean, self._rounds, self._accepted = self._accepted / BLOCK_ROUNDS, 0, 0
        if self.baseline is None:
            self._known = learn(self._known, mean)
            if self._known.blocks >= LEARN_BLOCKS:
                self.baseline = learnt(self._known)
            return True
        self._recent = mean if self._recent is None else self._recent + _NEWEST * (mean - self._recent)
        self._statistic = step(self._statistic, self.baseline, mean)
        self.drifted = self._statistic >= LIMIT or (self.drifted and self._statistic > 0)
        return True

    @property
    def view(self) -> View:
        return View(None if self.baseline is None else self.baseline.mean, self._recent, self.drifted)
