"""Which streams ride in the next step, and whether to wait for more of them first.

Glossary. A stream is *ready* (an item of it waits here), *on its way* (answered, and expected back within the learnt
return time) or *idle* (neither: late, or never answered). A stream is *admitted* once it holds KV blocks for its whole
item; until then it waits its turn and holds nothing, so that two half-read prompts can never starve each other.

Step formation. "Verify whatever is ready" splits the streams into two cohorts for ever: while one is verified the other
is drafted, and each step pays the fixed cost of a pass again. So a step waits for streams on their way, but only if
that is the shorter way to serve them all: T(ready + rest) + w < T(ready) + T(rest).

Who then rides, and who gives way when KV is short, is the business of `seating`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from outrider.engine.chunk import ChunkSize
from outrider.engine.formation import Formation, Piece, Pool, Work
from outrider.engine.pace import ReturnTime, StepTime
from outrider.engine.roster import Entry, Roster, in_turns
from outrider.engine.seating import Seating

_LEAST_WAIT_S = 0.0005
"""A shorter wait is below what a thread can be woken to."""


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
        self._seats = max_num_seqs
        self._budget = max_num_batched_tokens
        self._clock = clock
        self._streams: Roster = {}
        self._opened = 0
        self._arrivals = 0
        self._step_time = StepTime()
        self._return_time = ReturnTime()
        self._chunk = ChunkSize(self._step_time)
        self._seating = Seating(pool, self._streams, self._chunk, seats=max_num_seqs, budget=max_num_batched_tokens)

    @property
    def preemptions(self) -> int:
        """How often a stream lost its KV to an older one."""
        return self._seating.preemptions

    def open(self, stream_id: int, *, owner: bytes = b"", fork_of: int | None = None) -> None:
        """Takes note of a new stream, the youngest one.

        Args:
            stream_id: of the stream.
            owner: its coordinator; coordinators take turns.
            fork_of: stream whose prompt it shares; it waits until that has been read.
        """
        self._opened += 1
        self._streams[stream_id] = Entry(self._opened, owner, fork_of)

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
        stream.take(work)

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
            stream.work = None if last else work.after(fed)
            stream.served |= last
        if rows:
            (self._chunk if prefill else self._step_time).observe(rows, seconds)

    def form(self) -> Formation:
        """The next step, or how long to wait for it."""
        ready = in_turns(pair for pair in self._streams.items() if pair[1].work is not None)
        if not ready:
            return Formation()
        coming = self._coming()
        wait_s = self._worth_waiting(coming, [stream.work.tail for _, stream in ready if stream.work is not None])
        if wait_s > 0:
            return Formation(wait_s=wait_s)
        return self._seating.fill(ready, sum(rows for _, _, rows in coming))

    def _worth_waiting(self, coming: list[tuple[float, float, int]], ready_tails: list[int]) -> float:
        """Seconds to wait for streams on their way; 0 if starting now is no slower.

        Tries every number k of streams, soonest first: T(ready + k) + w_k + T(rest - k) against T(ready) + T(rest).
        Prompts are counted with their last rows only: what precedes them costs the same in either step.
        """
        seats = self._seats - len(ready_tails)
        budget = self._budget - sum(ready_tails)
        if seats <= 0 or budget <= 0:
            return 0.0
        coming = coming[:seats]
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
