"""What finished rounds say about acceptance: per slot, of each stream, falling back to the pair's.

Only finished rounds are looked at, so whatever is decided from this is decided before the slots concerned exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

FIRST_ACCEPTANCE = 0.7
"""What is assumed of a pair that nothing is known about."""
PAIR_PRIOR_ROUNDS = 4.0
"""Rounds after which what was seen of the pair outweighs that."""
SLOT_PRIOR_ROUNDS = 16.0
"""Rounds that reached a slot after which it outweighs the slot before it. With few, a handful of rejections by chance
would keep a slot from ever being asked for again."""
STREAM_PRIOR_ROUNDS = 16.0
"""Rounds of its own after which a stream outweighs what the pair does on average. With less, streams that differ by
chance alone would get different gammas, and a step of mixed gammas is the worse for it."""
STREAM_MEMORY = 0.97
PAIR_MEMORY = 0.995
"""Weight of what was known before, per round that tested a slot."""
UNTRIED_MEMORY = 0.999
"""The same for slots deeper than those asked for, per round: what put them off is forgotten in the end, and they are
tried again."""
EMPTY_WEIGHT = 0.1
"""Of a slot that was asked for and not proposed, beside one that was verified and rejected."""
PROBE_WEIGHT = 8.0
"""Of a probe: it stands for all the rounds that were not drafted since the last one."""


@dataclass(slots=True)
class Acceptance:
    """Discounted counts per slot: how often it was reached, and how often it was accepted then.

    The first slot that was asked for and not proposed counts as reached and not accepted, but with little weight:
    asking for it gained nothing, and cost a hop instead of a row. So a draft that often has nothing to say, like prompt
    lookup, is asked as long as what it does say pays.
    """

    accepted: list[float]
    reached: list[float]

    @classmethod
    def nothing(cls, depth: int) -> Acceptance:
        """Nothing seen yet, of `depth` slots."""
        return cls([0.0] * depth, [0.0] * depth)

    def add(self, asked: int, proposed: int, accepted: int, memory: float, weight: float = 1.0) -> None:
        """Adds a round that asked for `asked` slots, was given `proposed`, of which `accepted` were accepted."""
        for slot in range(min(accepted + 1, proposed, len(self.reached))):
            self._count(slot, weight, memory, accepted=slot < accepted)
        if accepted == proposed < min(asked, len(self.reached)):
            self._count(proposed, weight * EMPTY_WEIGHT, memory, accepted=False)

    def fade(self, memory: float, first: int = 0) -> None:
        """Lets a round's worth of what is known be forgotten, of slots from `first` on."""
        for slot in range(first, len(self.reached)):
            self.reached[slot] *= memory
            self.accepted[slot] *= memory

    def _count(self, slot: int, weight: float, memory: float, *, accepted: bool) -> None:
        kept = memory**weight
        self.reached[slot] = self.reached[slot] * kept + weight
        self.accepted[slot] = self.accepted[slot] * kept + weight * accepted


def pair_acceptance(pair: Acceptance) -> F64:
    """[depth] estimated s_i of the pair; a slot of which nothing is known is taken to be like the one before it."""
    prior = np.empty(len(pair.reached))
    above, weight = FIRST_ACCEPTANCE, PAIR_PRIOR_ROUNDS
    for slot, (accepted, reached) in enumerate(zip(pair.accepted, pair.reached, strict=True)):
        prior[slot] = above = (accepted + weight * above) / (reached + weight)
        weight = SLOT_PRIOR_ROUNDS
    return prior


def stream_acceptance(streams: Sequence[Acceptance], pair: Acceptance) -> F64:
    """[streams, depth] estimated s_i of every stream."""
    depth = len(pair.reached)
    accepted = np.array([stream.accepted for stream in streams]).reshape(-1, depth)
    reached = np.array([stream.reached for stream in streams]).reshape(-1, depth)
    return (accepted + STREAM_PRIOR_ROUNDS * pair_acceptance(pair)) / (reached + STREAM_PRIOR_ROUNDS)
