"""The controller: all gammas of a step together, from measured acceptance, measured costs and the present load.

It maximises expected tokens per second, 0 drafted tokens included (`economics.choose_gammas`). Acceptance alone is the
wrong signal: it hardly moves with load, while the best gamma falls from many to none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coordinator.costs import Costs
from coordinator.gamma_plan import Plan, make_plan, worth_of_a_slot
from coordinator.probes import Pause, Probes
from coordinator.survivals import (
    PAIR_MEMORY,
    PROBE_WEIGHT,
    STREAM_MEMORY,
    UNTRIED_MEMORY,
    Acceptance,
    pair_acceptance,
    stream_acceptance,
)

F64 = NDArray[np.float64]

FIRST_GAMMAS = (4, 1, 2)
"""Asked for one after the other while no profile says what they cost. From 0 and 4 alone a plan would see a line
between them, and never try what lies on a flat piece below it."""
HYSTERESIS = 0.04
"""Going to or from gamma = 0 must promise this much more throughput, for all streams together or each for its share."""
HYSTERESIS_HALF_LIFE_S = 2.0
"""It halves in this time since the last change, so that what keeps promising a little is done in the end."""
BAD_SHARE = 0.8
"""A stream that stops drafting with less than this share of the pair's acceptance does so for reasons of its own."""
RECENT_PROBE = 0.25
"""Weight of the newest probe where it is asked whether the draft became better."""
PLAN_PAUSE_S = 0.02
"""Seconds for which a plan holds at least, while no stream is new."""


@dataclass(slots=True)
class _Record:
    acceptance: Acceptance
    gamma: int | None = None
    """Of the present plan, None before the stream's first one."""
    breaker: Pause = field(default_factory=Pause)
    """Keeps a stream that is worse than its neighbours from drafting, each time for twice as long."""


@dataclass(slots=True)
class Auto:
    """Maximises G = sum_j E_j(gamma_j) / (T(rows) + T_draft(max_j gamma_j) + link) over all active streams.

    The plan is made anew when a quarter of the streams have finished a round since the last one, or a stream is new.
    Streams at gamma = 0 are probed with one drafted token (`probes`).
    """

    gamma_max: int
    costs: Costs
    clock: Callable[[], float] = time.monotonic
    _records: dict[int, _Record] = field(default_factory=dict)
    _pair: Acceptance = field(init=False)
    _probes: Probes = field(init=False)
    _rounds_since_plan: int = 0
    _planned_s: float = -np.inf
    _switched_s: float = -np.inf
    _drafts: bool = False
    _least_survival: float = 0.0
    _recent: float = 0.0
    """Acceptance of the last few probes."""

    def __post_init__(self) -> None:
        self._pair = Acceptance.nothing(self.gamma_max)
        self._probes = Probes(self.clock)

    @property
    def gammas(self) -> list[int]:
        """The present plan."""
        return [record.gamma or 0 for record in self._records.values()]

    @property
    def least_survival(self) -> float:
        return self._least_survival

    def choose(self, stream_ids: Sequence[int], limits: Sequence[int]) -> list[int]:
        for stream_id in stream_ids:
            if stream_id not in self._records:
                self._records[stream_id] = _Record(Acceptance.nothing(self.gamma_max))
                self._planned_s = -np.inf
        if (first := self._untried()) is not None:
            return [min(first, self.gamma_max, limit) for limit in limits]
        self._refresh()
        gammas = [
            min(self._records[stream_id].gamma or 0, limit) for stream_id, limit in zip(stream_ids, limits, strict=True)
        ]
        self._probe(stream_ids, limits, gammas)
        return gammas

    def wants(self, stream_id: int) -> bool:
        record = self._records.get(stream_id)
        if record is not None and self.costs:
            self._refresh()
        if record is None or record.gamma != 0:
            return True
        probes = self._probes
        if self._drafts or not probes.due or probes.candidate not in (None, stream_id):
            return False
        # One plain stream is called in for the probe; the others run on.
        probes.candidate = stream_id
        return True

    def finished(self, stream_id: int, asked: int, proposed: int, accepted: int) -> None:
        record = self._records.get(stream_id)
        if record is None:
            return
        self._rounds_since_plan += 1
        probed = self._probes.probing == stream_id
        if asked == 0:
            if probed:  # its proposal never came
                self._probes.ended(again=False, promising=False)
            self._rested(record)
            return
        weight = PROBE_WEIGHT if probed and not self._drafts else 1.0
        record.acceptance.add(asked, proposed, accepted, STREAM_MEMORY, weight)
        self._pair.add(asked, proposed, accepted, PAIR_MEMORY, weight)
        self._pair.fade(UNTRIED_MEMORY, first=asked)
        if probed:
            self._probed(accepted=accepted > 0)

    def forget(self, stream_id: int) -> None:
        self._records.pop(stream_id, None)
        self._probes.forget(stream_id)

    def acceptance(self) -> F64:
        """[streams, gamma_max] estimated s_i of every active stream."""
        return stream_acceptance([record.acceptance for record in self._records.values()], self._pair)

    def _untried(self) -> int | None:
        """A gamma whose cost is to be seen before a plan is made, or None."""
        if self.costs.target_profile is not None and self.costs.draft.is_known:
            return None
        gammas = (min(gamma, self.gamma_max) for gamma in FIRST_GAMMAS)
        return next((gamma for gamma in gammas if not self.costs.draft.has_seen(gamma)), None)

    # ---- the plan ----

    def _refresh(self) -> None:
        """Makes the plan anew if enough has happened since the last one."""
        now_s = self.clock()
        fresh = now_s - self._planned_s < PLAN_PAUSE_S or self._rounds_since_plan < len(self._records) / 4
        if fresh and self._planned_s > -np.inf:
            return
        self._rounds_since_plan, self._planned_s = 0, now_s
        records = list(self._records.values())
        survivals: F64 = np.cumprod(self.acceptance(), axis=1, dtype=np.float64)
        survivals[[now_s < record.breaker.until_s for record in records]] = 0.0
        plan = self._plan(survivals)
        if plan.switched:
            self._switched_s = now_s
        drafts = bool(plan.gammas.any())
        for record, gamma in zip(records, plan.gammas.tolist(), strict=True):
            if record.gamma and not gamma and drafts and self._is_bad(record):
                record.breaker.failed(now_s)
            record.gamma = gamma
        self._drafts = drafts
        self._least_survival = worth_of_a_slot(self.costs, survivals, plan.gammas)

    def _plan(self, survivals: F64) -> Plan:
        margin = HYSTERESIS * float(0.5 ** ((self.clock() - self._switched_s) / HYSTERESIS_HALF_LIFE_S))
        return make_plan(self.costs, survivals, [record.gamma for record in self._records.values()], margin)

    def _is_bad(self, record: _Record) -> bool:
        """Whether it is for its own acceptance that a stream stops drafting, rather than for the load."""
        own = stream_acceptance([record.acceptance], self._pair)[0, 0]
        return bool(own < BAD_SHARE * pair_acceptance(self._pair)[0])

    def _rested(self, record: _Record) -> None:
        """A plain token of a stream whose neighbours draft: what was held against it fades, so that it gets its turn.

        A bad one must first sit out its breaker, which takes twice as long every time.
        """
        if self._drafts and record.gamma == 0 and self.clock() >= record.breaker.until_s:
            record.acceptance.fade(STREAM_MEMORY)

    # ---- probes ----

    def _probe(self, stream_ids: Sequence[int], limits: Sequence[int], gammas: list[int]) -> None:
        """Lets the stream of which least is known draft one token, if no stream drafts and it is time to try."""
        if self._drafts or not self._probes.due:
            return
        idle = [
            (self._records[stream_id].acceptance.reached[0], index)
            for index, stream_id in enumerate(stream_ids)
            if gammas[index] == 0 and limits[index] > 0
        ]
        if idle:
            index = min(idle)[1]
            gammas[index] = 1
            streams = len(self._records)
            self._probes.began(
                stream_ids[index], float(self.costs.round_s(1)[1]), float(self.costs.step_s(streams)) / streams
            )

    def _probed(self, *, accepted: bool) -> None:
        """A probe ended: is there to be drafting from now on, would there be if every token were accepted, and would
        there be if the draft were as good as its last few probes?"""
        self._recent += RECENT_PROBE * (accepted - self._recent)
        self._planned_s = -np.inf
        self._refresh()
        self._probes.ended(
            again=accepted and not self._drafts and self._would_draft(1.0),
            promising=self._drafts or self._would_draft(self._recent),
        )

    def _would_draft(self, acceptance: float) -> bool:
        """Whether there would be drafting if every slot of every stream were accepted with this chance."""
        depths = np.tile(acceptance ** np.arange(1.0, self.gamma_max + 1), (len(self._records), 1))
        return bool(self._plan(depths).gammas.any())
