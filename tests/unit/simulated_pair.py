"""A draft, a target and the decoding loop as a discrete-event simulation: no threads, no sleeping, no machine speed.

The target forms its steps with the engine's own scheduler; the draft draws one slot per step for all streams that are
with it; streams go the way of `Decoder` (joint choice for those whose rounds end in one message, plain runs with credit
that is topped up, draining before a stream drafts again). Tokens are counted by their expectation, so that a run of
seconds has no sampling error, while the controller sees coins.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.costs import Costs
from coordinator.gamma import Controller
from outrider.economics import LinearCost, expected_tokens
from outrider.engine.formation import Work
from outrider.engine.scheduler import Scheduler

STEP = LinearCost(fixed_s=0.010, token_s=0.0005, free_tokens=16)
"""The stub pair of the performance notes: 10 ms for up to 16 rows, 0.5 ms for each further one."""
LINK_S = 0.0001
CREDIT = 8


class _Room:
    """A KV pool without end."""

    def fits(self, *tokens: int) -> bool:
        return True

    def admit(self, stream_id: int, work: Work, spare_blocks: int) -> int | None:
        return 0

    def grow(self, stream_id: int, tokens: int, spare_blocks: int) -> bool:
        return True

    def release(self, stream_id: int) -> None:
        pass


@dataclass
class _Stream:
    alpha: float
    asked: int = 0
    run_left: int = 0
    draining: bool = False
    asked_s: float = 0.0
    slots_left: int = 0


class SimulatedPair:
    """A pair under a closed loop of streams.

    Attributes:
        now_s: simulated time.
        tokens: expected tokens emitted.
        rounds, drafted_rounds: rounds so far (a plain token is one), and those with a proposal.
        drafted: rounds with a proposal, by open stream.
    """

    def __init__(
        self,
        make: Callable[[Costs, Callable[[], float]], Controller],
        *,
        alpha: float = 0.8,
        slot_s: float = 0.001,
        proposal_s: float = 0.0,
        step: LinearCost = STEP,
        seed: int = 1,
    ) -> None:
        """`proposal_s` is what a proposal costs beside its slots."""
        self.now_s = self.tokens = 0.0
        self.rounds = self.drafted_rounds = 0
        self.drafted: dict[int, int] = {}
        self.costs = Costs()
        self._alpha = alpha
        self.controller = make(self.costs, lambda: self.now_s)
        self.slot_s = slot_s
        self._proposal_s = proposal_s
        self._step = step
        self._random = np.random.default_rng(seed)
        self._scheduler = Scheduler(_Room(), max_num_seqs=256, max_num_batched_tokens=4096, clock=lambda: self.now_s)
        self._streams: dict[int, _Stream] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = self._opened = 0
        self._target_busy = self._draft_busy = False
        self._wake = 0
        self._drafting: list[int] = []

    # ---- load ----

    def set_streams(self, number: int) -> None:
        """Opens or ends streams until there are so many."""
        while len(self._streams) > number:
            self._end(next(iter(self._streams)))
        while len(self._streams) < number:
            self._open(self._alpha)

    def end_and_open(self, alpha: float) -> int:
        """Another stream in place of the oldest one; returns its id."""
        self._end(next(iter(self._streams)))
        return self._open(alpha)

    def set_alpha(self, alpha: float) -> None:
        """The draft became another one."""
        self._alpha = alpha
        for stream in self._streams.values():
            stream.alpha = alpha

    def _end(self, stream_id: int) -> None:
        del self._streams[stream_id], self.drafted[stream_id]
        self._scheduler.close(stream_id)
        self.controller.forget(stream_id)

    def _open(self, alpha: float) -> int:
        self._opened += 1
        self._streams[self._opened], self.drafted[self._opened] = _Stream(alpha, run_left=1), 0
        self._scheduler.open(self._opened)
        self._submit(self._opened, 1)  # the first round is plain
        return self._opened

    def run(self, seconds: float) -> float:
        """Lets time pass; returns expected tokens per second meanwhile."""
        until, before, since_s = self.now_s + seconds, self.tokens, self.now_s
        while self._events and self._events[0][0] <= until:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        self.now_s = until
        return (self.tokens - before) / (self.now_s - since_s)

    # ---- coordinator ----

    def _next_rounds(self, stream_ids: Sequence[int]) -> None:
        gammas = self.controller.choose(stream_ids, [8] * len(stream_ids))
        for stream_id, gamma in zip(stream_ids, gammas, strict=True):
            stream = self._streams[stream_id]
            stream.draining = False
            if gamma == 0:
                stream.run_left = CREDIT
                self._later(LINK_S / 2, self._submit, stream_id, 1)
            else:
                stream.asked = stream.slots_left = gamma
                stream.asked_s = self.now_s
                self._later(LINK_S / 2, self._draft, stream_id)

    def _settled(self, stream_ids: Sequence[int]) -> None:
        ready = []
        for stream_id in stream_ids:
            stream = self._streams.get(stream_id)
            if stream is None:
                continue
            gamma, stream.asked = stream.asked, 0
            rejected = np.flatnonzero(self._random.random(gamma) >= stream.alpha)
            self.tokens += expected_tokens(stream.alpha, gamma)
            self.rounds += 1
            self.drafted_rounds += gamma > 0
            self.drafted[stream_id] += gamma > 0
            self.controller.finished(stream_id, gamma, gamma, int(rejected[0]) if len(rejected) else gamma)
            if stream.run_left == 0:
                ready.append(stream_id)
            elif not stream.draining and stream.run_left <= CREDIT // 2:
                if self.controller.wants(stream_id):
                    stream.draining = True
                else:
                    stream.run_left = CREDIT
        if ready:
            self._next_rounds(ready)

    # ---- draft ----

    def _draft(self, stream_id: int) -> None:
        self._drafting.append(stream_id)
        if not self._draft_busy:
            # Items of one message arrive at the same instant; the step begins when all of them are there.
            self._draft_busy = True
            self._later(0.0, self._draft_step, self._proposal_s)

    def _draft_step(self, extra_s: float = 0.0) -> None:
        riding = list(self._drafting)
        self._later(self.slot_s + extra_s, self._drafted, riding)

    def _drafted(self, riding: list[int]) -> None:
        done = []
        for stream_id in riding:
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.slots_left -= 1
            if stream is None or stream.slots_left == 0:
                self._drafting.remove(stream_id)
                done.append(stream_id)
        if done:
            self._later(LINK_S / 2, self._proposed, done)
        if self._drafting:
            self._draft_step()
        else:
            self._draft_busy = False

    def _proposed(self, stream_ids: list[int]) -> None:
        slowest: dict[int, float] = {}
        for stream_id in stream_ids:
            stream = self._streams.get(stream_id)
            if stream is not None:
                slowest[stream.asked] = max(slowest.get(stream.asked, 0.0), self.now_s - stream.asked_s)
                self._later(LINK_S / 2, self._submit, stream_id, stream.asked + 1)
        for asked, seconds in slowest.items():
            self.costs.draft.observe(asked, seconds)

    # ---- target ----

    def _submit(self, stream_id: int, rows: int) -> None:
        if stream_id in self._streams:
            self._scheduler.submit(stream_id, Work(100, rows, rows), arrived_s=self.now_s)
            self._rouse()

    def _rouse(self, wake: int | None = None) -> None:
        """Looks for a step at the end of the present instant, when all that arrives now is there."""
        if wake is None or wake == self._wake:
            self._wake += 1
            self._later(0.0, self._form, self._wake)

    def _form(self, wake: int) -> None:
        if self._target_busy or wake != self._wake:
            return
        formation = self._scheduler.form()
        if formation.pieces:
            self._target_busy = True
            rows = sum(piece.rows for piece in formation.pieces)
            seconds = float(self._step(rows))
            self._later(seconds, self._stepped, formation.pieces, rows, seconds)
        elif formation.wait_s is not None:
            self._later(formation.wait_s, self._rouse, self._wake)

    def _stepped(self, pieces: Sequence[tuple[int, int, bool]], rows: int, seconds: float) -> None:
        self._target_busy = False
        self._scheduler.ran(pieces, seconds)  # type: ignore[arg-type]
        settled = []
        for stream_id, _, _ in pieces:
            stream = self._streams.get(stream_id)
            if stream is None:
                continue
            settled.append(stream_id)
            if stream.run_left > 0:
                stream.run_left -= 1
            if stream.run_left > 0:
                self._scheduler.submit(stream_id, Work(100, 1, 1), arrived_s=self.now_s)
            else:
                self._scheduler.answered(stream_id, stream.asked)
        self._later(LINK_S / 2, self._heard, settled, rows, seconds)
        self._rouse()

    def _heard(self, settled: list[int], rows: int, seconds: float) -> None:
        self.costs.target.observe(rows, seconds)
        self.costs.observe_link(LINK_S)
        self._settled(settled)

    def _later(self, seconds: float, action: Callable[..., None], *arguments: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + seconds, self._count, lambda: action(*arguments)))
