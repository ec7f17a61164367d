"""Which streams ride in the next step, and whether to wait for more of them first.

Glossary. A stream is *ready* (an item of it waits here), *on its way* (answered, and expected back within the learnt
return time) or *idle* (neither: late, or never answered). A stream is *admitted* once it holds KV blocks for its whole
item; until then it waits its turn and holds nothing, so that two half-read prompts can never starve each other.

Step formation. "Verify whatever is ready" splits the streams into two cohorts for ever: while one is verified the other
is drafted, and each step pays the fixed cost of a pass again. So a step waits for streams on their way, but only if
that is the shorter way to serve them all: T(ready + rest) + w < T(ready) + T(rest).

KV. The oldest streams make progress whatever happens: when an admitted stream cannot grow, the youngest one loses its
blocks (its next item, should it have none here, is computed from the start again). A new stream is admitted in order of
arrival and never at another's cost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.engine.formation import Formation, Piece, Pool, Work
from outrider.engine.pace import ReturnTime, StepTime

log = logging.getLogger(__name__)

_LEAST_WAIT_S = 0.0005
"""A shorter wait is below what a thread can be woken to."""


@dataclass(slots=True)
class _Stream:
    order: int
    admitted: bool = False
    work: Work | None = None
    arrived: int = 0
    """Order of arrival of the work, over all streams; 0 before the first."""
    gamma: int = 0
    """Slots of the last item answered."""
    answered_s: float | None = None
    """When it was answered; None while work is here and before the first answer."""


class Scheduler:
    """Forms steps from the outstanding items of many streams.

    Args:
        pool: KV room.
        max_num_seqs: streams in one step at most.
        max_num_batched_tokens: token rows in one step at most; no less than the longest item's tail.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._seats = max_num_seqs
        self._budget = max_num_batched_tokens
        self._clock = clock
        self._streams: dict[int, _Stream] = {}
        self._opened = 0
        self._arrivals = 0
        self._step_time = StepTime()
        self._return_time = ReturnTime()
        self.preemptions = 0

    def open(self, stream_id: int) -> None:
        """Takes note of a new stream, the youngest one."""
        self._opened += 1
        self._streams[stream_id] = _Stream(order=self._opened)

    def close(self, stream_id: int) -> None:
        """Forgets a stream; its blocks are the caller's to free. Unknown ones are ignored."""
        self._streams.pop(stream_id, None)

    def submit(self, stream_id: int, work: Work, *, arrived_s: float) -> None:
        """An item of the stream is here, or the next token of its plain run; replaces what was outstanding.

        `arrived_s` is when it reached the process, on the scheduler's clock: it may have waited for a step to end.
        """
        stream = self._streams[stream_id]
        if stream.answered_s is not None:
            self._return_time.observe(stream.gamma, arrived_s - stream.answered_s)
            stream.answered_s = None
        if stream.admitted or not stream.arrived:  # Who waits for room keeps its place, however often it asks.
            self._arrivals += 1
            stream.arrived = self._arrivals
        stream.work = work

    def answered(self, stream_id: int, gamma: int) -> None:
        """The stream's item of `gamma` slots was answered for good: the stream is on its way."""
        stream = self._streams[stream_id]
        stream.work = None
        stream.gamma = gamma
        stream.answered_s = self._clock()

    def withdraw(self, stream_id: int) -> None:
        """The stream's item is not wanted any more; nobody knows when the next one comes."""
        stream = self._streams[stream_id]
        stream.work = stream.answered_s = None

    def ran(self, pieces: Iterable[Piece], seconds: float) -> None:
        """A step was run: what is left of each item, and what the step teaches about T."""
        rows = 0
        prefill = False
        for stream_id, fed, last in pieces:
            rows += fed
            stream = self._streams.get(stream_id)
            if stream is None or stream.work is None:
                continue
            work = stream.work
            prefill |= work.prefilling
            stream.work = None if last else Work(work.tokens, work.rows - fed, work.tail)
        if rows and not prefill:
            self._step_time.observe(rows, seconds)

    def form(self) -> Formation:
        """The next step, or how long to wait for it."""
        ready = sorted(
            ((stream_id, stream) for stream_id, stream in self._streams.items() if stream.work is not None),
            key=lambda entry: entry[1].arrived,
        )
        if not ready:
            return Formation()
        wait_s = self._worth_waiting([stream.work.tail for _, stream in ready if stream.work is not None])
        if wait_s > 0:
            return Formation(wait_s=wait_s)
        return self._fill(ready)

    def _worth_waiting(self, ready_tails: list[int]) -> float:
        """Seconds to wait for streams on their way; 0 if starting now is no slower.

        Tries every number k of streams, soonest first: T(ready + k) + w_k + T(rest - k) against T(ready) + T(rest).
        Prompts are counted with their last rows only: what precedes them costs the same in either step.
        """
        seats = self._seats - len(ready_tails)
        budget = self._budget - sum(ready_tails)
        if seats <= 0 or budget <= 0:
            return 0.0
        coming = self._coming()[:seats]
        if not coming:
            return 0.0
        predict = self._step_time.predict
        ready, rest = sum(ready_tails), sum(rows for _, _, rows in coming)
        limit = min(max(return_s for _, return_s, _ in coming), predict(min(ready + rest, self._budget)) / 2)
        best, best_wait = predict(ready) + predict(rest), 0.0
        joined = 0
        for wait_s, _, rows in coming:
            joined += rows
            if wait_s > limit or joined > budget:
                break
            total = predict(ready + joined) + wait_s + predict(rest - joined)
            if total < best:
                best, best_wait = total, wait_s
        return best_wait

    def _coming(self) -> list[tuple[float, float, int]]:
        """Streams on their way, soonest first: seconds to go, seconds of the whole return, rows they will bring."""
        now = self._clock()
        coming = []
        for stream in self._streams.values():
            if stream.answered_s is None or (expected := self._return_time.expect(stream.gamma)) is None:
                continue
            gone = now - stream.answered_s
            if gone >= expected.latest_s:
                continue
            # Past its mean a stream is due any moment; half of what is left until it counts as late is a fair guess.
            wait_s = expected.mean_s - gone
            if wait_s <= 0:
                wait_s = (expected.latest_s - gone) / 2
            coming.append((max(wait_s, _LEAST_WAIT_S), expected.mean_s, stream.gamma + 1))
        return sorted(coming)

    def _fill(self, ready: list[tuple[int, _Stream]]) -> Formation:
        """Seats and rows, oldest arrival first; prompts take at most half of the rows while others decode."""
        decoding = any(stream.work is not None and not stream.work.prefilling for _, stream in ready)
        rows_left = self._budget
        prefill_left = self._budget // 2 if decoding else self._budget
        pieces: list[Piece] = []
        preempted: list[int] = []
        refused: list[int] = []
        riding: set[int] = set()
        admitting = True
        for stream_id, stream in ready:
            work = stream.work
            if work is None or stream_id not in self._streams or len(pieces) == self._seats:
                continue
            if not self._pool.fits(work.tokens):
                self.close(stream_id)
                refused.append(stream_id)
                continue
            if work.prefilling:
                room = min(rows_left, prefill_left)
                rows = work.rows if work.rows <= room else min(room, work.rows - work.tail)
            else:
                rows = work.rows
            if not 0 < rows <= rows_left:
                continue
            if stream.admitted:
                if not self._make_room(stream_id, stream, work, riding, preempted):
                    continue
            elif not (admitting := admitting and self._admit(stream_id, stream, work)):
                continue
            pieces.append(Piece(stream_id, rows, rows == work.rows))
            riding.add(stream_id)
            rows_left -= rows
            if work.prefilling:
                prefill_left -= rows
        return Formation(tuple(pieces), None, tuple(preempted), tuple(refused))

    def _admit(self, stream_id: int, stream: _Stream, work: Work) -> bool:
        """Room for a new stream, leaving a block for each admitted one to grow into."""
        others = sum(other.admitted for other in self._streams.values())
        stream.admitted = self._pool.grow(stream_id, work.tokens, spare_blocks=others)
        return stream.admitted

    def _make_room(self, stream_id: int, stream: _Stream, work: Work, riding: set[int], preempted: list[int]) -> bool:
        """Room for an admitted stream at the cost of the youngest; False if it must wait or was itself the youngest."""
        while not self._pool.grow(stream_id, work.tokens, spare_blocks=0):
            youngest_id, youngest = max(
                ((key, other) for key, other in self._streams.items() if other.admitted),
                key=lambda entry: entry[1].order,
            )
            if youngest_id in riding:
                return False
            self._pool.release(youngest_id)
            youngest.admitted = False
            self.preemptions += 1
            if youngest.work is not None:
                self.close(youngest_id)
                preempted.append(youngest_id)
            log.info("stream %016x loses its KV: the pool is full", youngest_id)
            if youngest is stream:
                return False
        return True
