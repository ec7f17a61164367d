"""The controller: how many tokens each stream drafts in its next round.

`Fixed` asks for a constant. `Auto` maximises expected tokens per second over all active streams together, 0 included
(`economics.choose_gammas`), from what finished rounds and measured times have taught it. Acceptance alone is the wrong
signal: it hardly moves with load, while the best gamma falls from many to none.

Everything here is decided before the slots concerned exist, so no choice can bias the emitted law (only finished rounds
are looked at).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coordinator.cost_table import CostTable
from outrider.economics import choose_gammas

F64 = NDArray[np.float64]

FIRST_GAMMA = 4
"""Asked for until both costs have been seen."""
FIRST_ACCEPTANCE = 0.7
"""What is assumed of a pair that nothing is known about."""
PRIOR_ROUNDS = 4.0
"""Rounds of its own after which a stream outweighs what the pair does on average."""
STREAM_MEMORY = 0.9
PAIR_MEMORY = 0.98
"""Weight of what was known before, per round that tested a slot."""
EMPTY_WEIGHT = 0.1
"""Of a slot that was asked for and not proposed, beside one that was verified and rejected."""
HYSTERESIS = 0.04
"""Going to or from gamma = 0 must promise this much more throughput, for all streams together or each for its share."""
PROBE_SHARE = 0.005
"""Share of the time that probes may cost."""
PROBE_PAUSE_S = (0.5, 60.0)
"""Seconds between probes, first and at most; doubled by every probe that confirms gamma = 0."""
_NEWEST = 0.1


class Costs:
    """Measured times, in seconds: of target steps by token rows, of proposals by slots, of the way to the target."""

    def __init__(self) -> None:
        self.target = CostTable()
        self.draft = CostTable()
        self.link_s = 0.0

    def observe_link(self, seconds: float) -> None:
        """Adds one round trip to the target without the target's own time."""
        self.link_s += _NEWEST * (max(0.0, seconds) - self.link_s)


class Controller(Protocol):
    """Chooses gamma for every round; 0 means plain decoding."""

    def choose(self, stream_ids: Sequence[int], limits: Sequence[int]) -> list[int]:
        """The gammas of the streams that start a round now; `limits` is what each may draft at most."""

    def wants(self, stream_id: int) -> bool:
        """Whether a stream that is decoded plainly should go over to drafting."""

    def finished(self, stream_id: int, asked: int, proposed: int, accepted: int) -> None:
        """A round that asked for `asked` slots (0: a plain one) was given `proposed`; `accepted` were accepted."""

    def forget(self, stream_id: int) -> None:
        """The stream ended."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same gamma for every round, as far as the stream's limit allows."""

    gamma: int

    def choose(self, stream_ids: Sequence[int], limits: Sequence[int]) -> list[int]:
        return [min(self.gamma, limit) for limit in limits]

    def wants(self, stream_id: int) -> bool:
        return self.gamma > 0

    def finished(self, stream_id: int, asked: int, proposed: int, accepted: int) -> None:
        pass

    def forget(self, stream_id: int) -> None:
        pass


@dataclass(slots=True)
class _Acceptance:
    """Discounted counts per slot: how often it was reached, and how often it was accepted then.

    The first slot that was asked for and not proposed counts as reached and not accepted, but with little weight:
    asking for it gained nothing, and cost a hop instead of a row. So a draft that often has nothing to say, like prompt
    lookup, is asked as long as what it does say pays.
    """

    accepted: list[float]
    reached: list[float]

    def add(self, asked: int, proposed: int, accepted: int, memory: float) -> None:
        for slot in range(min(accepted + 1, proposed, len(self.reached))):
            self._count(slot, 1.0, memory, accepted=slot < accepted)
        if accepted == proposed < min(asked, len(self.reached)):
            self._count(proposed, EMPTY_WEIGHT, memory, accepted=False)

    def _count(self, slot: int, weight: float, memory: float, *, accepted: bool) -> None:
        kept = memory**weight
        self.reached[slot] = self.reached[slot] * kept + weight
        self.accepted[slot] = self.accepted[slot] * kept + weight * accepted


@dataclass(slots=True)
class _Record:
    acceptance: _Acceptance
    gamma: int | None = None
    """Of the present plan, None before the stream's first one."""
    probing: bool = False


@dataclass(slots=True)
class Auto:
    """Maximises G = sum_j E_j(gamma_j) / (T(rows) + T_draft(max_j gamma_j) + link) over all active streams.

    The plan is made anew when a quarter of the streams have finished a round since the last one, or a stream is new.
    """

    gamma_max: int
    costs: Costs
    clock: Callable[[], float] = time.monotonic
    _records: dict[int, _Record] = field(default_factory=dict)
    _pair: _Acceptance = field(init=False)
    _rounds_since_plan: int = 0
    _probe_pause_s: float = PROBE_PAUSE_S[0]
    _next_probe_s: float = 0.0
    _candidate: int | None = None

    def __post_init__(self) -> None:
        self._pair = self._nothing_known()

    def choose(self, stream_ids: Sequence[int], limits: Sequence[int]) -> list[int]:
        for stream_id in stream_ids:
            if stream_id not in self._records:
                self._records[stream_id] = _Record(self._nothing_known())
                self._rounds_since_plan = len(self._records)
        if not (self.costs.target and self.costs.draft):
            return [min(FIRST_GAMMA, self.gamma_max, limit) for limit in limits]
        self._refresh()
        gammas = [
            min(self._records[stream_id].gamma or 0, limit) for stream_id, limit in zip(stream_ids, limits, strict=True)
        ]
        self._probe(stream_ids, limits, gammas)
        return gammas

    def wants(self, stream_id: int) -> bool:
        record = self._records.get(stream_id)
        if record is not None and self.costs.target and self.costs.draft:
            self._refresh()
        if record is None or record.gamma != 0:
            return True
        if self.clock() < self._next_probe_s or self._candidate not in (None, stream_id):
            return False
        # One plain stream is called in for the probe; the others run on.
        self._candidate = stream_id
        return True

    def finished(self, stream_id: int, asked: int, proposed: int, accepted: int) -> None:
        record = self._records.get(stream_id)
        if record is None:
            return
        self._rounds_since_plan += 1
        record.acceptance.add(asked, proposed, accepted, STREAM_MEMORY)
        self._pair.add(asked, proposed, accepted, PAIR_MEMORY)
        if record.probing and asked:
            record.probing = False
            self._probed(confirmed_zero=accepted == 0)

    def forget(self, stream_id: int) -> None:
        self._records.pop(stream_id, None)
        if self._candidate == stream_id:
            self._candidate = None

    def acceptance(self) -> F64:
        """[streams, gamma_max] estimated s_i of every active stream."""
        prior = np.empty(self.gamma_max)
        above = FIRST_ACCEPTANCE
        for slot in range(self.gamma_max):
            above = (self._pair.accepted[slot] + PRIOR_ROUNDS * above) / (self._pair.reached[slot] + PRIOR_ROUNDS)
            prior[slot] = above
        records = self._records.values()
        accepted = np.array([record.acceptance.accepted for record in records]).reshape(-1, self.gamma_max)
        reached = np.array([record.acceptance.reached for record in records]).reshape(-1, self.gamma_max)
        return (accepted + PRIOR_ROUNDS * prior) / (reached + PRIOR_ROUNDS)

    def _refresh(self) -> None:
        """Makes the plan anew if enough has happened since the last one."""
        if self._rounds_since_plan < len(self._records) / 4:
            return
        self._rounds_since_plan = 0
        records = list(self._records.values())
        survivals: F64 = np.cumprod(self.acceptance(), axis=1, dtype=np.float64)
        draft_s = np.maximum.accumulate(self.costs.draft.predict(np.arange(self.gamma_max + 1)) + self.costs.link_s)
        draft_s[0] = 0.0  # plain streams run free of the draft and of the round trip
        best = choose_gammas(survivals, self.costs.target.predict, draft_s)
        present = np.array([b if r.gamma is None else r.gamma for r, b in zip(records, best.tolist(), strict=True)])
        # Between two gammas above 0 a change costs nothing; to and from 0 it costs a drained run or a catch-up.
        switched = (best == 0) != (present == 0)
        stay = np.where(switched, present, best)
        needed = 1 + HYSTERESIS * float(switched.mean()) if len(records) else 1.0
        if switched.any() and self._rate(survivals, best, draft_s) < needed * self._rate(survivals, stay, draft_s):
            best = stay
        for record, gamma in zip(records, best.tolist(), strict=True):
            record.gamma = gamma

    def _rate(self, survivals: F64, gammas: NDArray[np.int64], draft_s: F64) -> float:
        """Expected tokens per second of a plan."""
        streams, depth = survivals.shape
        gained = survivals[np.arange(depth) < gammas[:, None]].sum()
        step_s = float(self.costs.target.predict(streams + gammas.sum()))
        return float(streams + gained) / (step_s + float(draft_s[gammas.max(initial=0)]))

    def _probe(self, stream_ids: Sequence[int], limits: Sequence[int], gammas: list[int]) -> None:
        """Lets the stream of which least is known draft one token, if it is time to and its plan says 0."""
        if self.clock() < self._next_probe_s:
            return
        idle = [
            (self._records[stream_id].acceptance.reached[0], index)
            for index, stream_id in enumerate(stream_ids)
            if gammas[index] == 0 and limits[index] > 0
        ]
        if idle:
            index = min(idle)[1]
            gammas[index], self._candidate = 1, None
            self._records[stream_ids[index]].probing = True
            self._next_probe_s = self.clock() + self._pause_s()

    def _probed(self, *, confirmed_zero: bool) -> None:
        """A probe that was accepted calls for the next one at once; one that was not doubles the pause."""
        if confirmed_zero:
            self._next_probe_s = self.clock() + self._pause_s()
            self._probe_pause_s = min(2 * self._probe_pause_s, PROBE_PAUSE_S[1])
        else:
            self._next_probe_s, self._probe_pause_s = self.clock(), PROBE_PAUSE_S[0]

    def _pause_s(self) -> float:
        cost_s = float(self.costs.draft.predict(1)) + self.costs.link_s
        return max(self._probe_pause_s, cost_s / PROBE_SHARE)

    def _nothing_known(self) -> _Acceptance:
        return _Acceptance([0.0] * self.gamma_max, [0.0] * self.gamma_max)
