"""Proposer: a causal LM as draft, gamma tokens for many streams, one slot per step.

Every step feeds each outstanding stream whatever lies between its cached and its known tokens (the catch-up: one or two
committed tokens after a round, a whole prompt at first) or the token it drafted last, and draws the next slot. Streams
join and leave at every step. A proposal leaves when its slots are done, or at the slot boundary where its deadline has
passed, then with what is done: whether a slot exists never depends on its content, only on time and on earlier slots.
A draft that takes its first choice also stops before a slot for which it is not sure enough. Its token is then a
function of the tokens before it, and so is the decision; where tokens are drawn there is no such stop.

KV. What was drafted stays cached; the next item cuts it to the common prefix. After a round with all gamma slots
accepted the draft holds committed - 2 tokens (the last one drafted was never fed), else committed - 1; both are
outcomes of `Sequence.sync`, not rules written here. Who gets KV blocks is the business of `kv_room`.
"""

from __future__ import annotations

import logging
import math
import time

from torch import Tensor

from draft_service.intake import Clock, Intake, Message, Send, send_as_is
from draft_service.job import Job
from draft_service.kv_room import KVRoom
from draft_service.sampler import Sampler
from outrider.engine.batch import Span
from outrider.engine.chunk import ChunkSize
from outrider.engine.pace import StepTime
from outrider.engine.runner import Step, StepTiming, Wait
from outrider.engine.sequence import Sequence
from outrider.engine.streams import Streams

logger = logging.getLogger(__name__)

_CATCH_UP_ROWS = 64
"""More tokens than these are a prompt to be read in pieces, not the few that a round commits."""

_PROMPT_SHARE = 8
"""While others draft, prompts get at most this fraction of a step's rows, and no more than keeps the step short."""


class Proposer:
    """The draft service's worker. Used in the engine thread only.

    Args:
        streams: with the model's KV pool behind them.
        sampler: draws the slots.
        vocab_rows: ids that the model can read.
        max_model_len: positions that a stream may have.
        max_num_seqs: streams in one step.
        max_num_batched_tokens: token rows in one step.
        window: last positions whose KV is kept, beside the first few; None keeps all.
        clock: monotonic, in seconds.
        send: as in `Intake`.
    """

    def __init__(
        self,
        streams: Streams,
        sampler: Sampler,
        *,
        vocab_rows: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int | None = None,
        clock: Clock = time.monotonic,
        send: Send = send_as_is,
    ) -> None:
        self.intake = Intake(streams, clock, send)
        self._streams = streams
        self._sampler = sampler
        self._vocab_rows = vocab_rows
        self._max_model_len = max_model_len
        self._seats = max_num_seqs
        self._budget = max_num_batched_tokens
        self._clock = clock
        self._plain = StepTime()
        self._chunk = ChunkSize(self._plain)
        self.room = KVRoom(
            streams, self.intake.jobs, max_model_len=max_model_len, piece=max_num_batched_tokens, window=window
        )

    def receive(self, message: Message) -> None:
        self.intake.receive(message)

    def plan(self) -> Step[list[Job]] | Wait | None:
        self.intake.expire()
        now = self._clock()
        for job in list(self.intake.jobs.values()):
            if self._is_done(job, self.intake.sequence(job), now):
                self._finish(job)
        step = self._form(now)
        self.intake.flush()
        if step is not None:
            return step
        next_end = min([self._streams.next_end, *(job.deadline_s for job in self.intake.jobs.values())])
        return None if math.isinf(next_end) else Wait(max(next_end - now, 0.0))

    def finish(self, step: Step[list[Job]], logits: Tensor, timing: StepTiming) -> None:
        rows = []
        for job, span in zip(step.payload, step.spans, strict=True):
            sequence = self.intake.sequence(job)
            sequence.fed(span)
            self._streams.kv.publish(sequence)
            self.room.slide(sequence)
            if span.wanted:
                rows.append((job, sequence))
        has_prompt = any(len(span.tokens) > _CATCH_UP_ROWS or not span.wanted for span in step.spans)
        slots = self._sampler.draw(logits, rows, self.intake.excluded) if rows else []
        forward_ms = timing.measure()  # Not before what was drawn is there: until then it would mean waiting twice.
        sample_ms = max((self._clock() - timing.started) * 1_000 - forward_ms, 0.0)
        (self._chunk if has_prompt else self._plain).observe(timing.tokens, forward_ms / 1_000)
        for job in step.payload:
            job.started_s = timing.started if job.started_s is None else job.started_s
            job.forward_ms += forward_ms
            job.sample_ms += sample_ms
            job.step_streams, job.step_tokens = timing.streams, timing.tokens
        now = self._clock()
        for (job, sequence), slot in zip(rows, slots, strict=True):
            if slot is None:
                logger.warning("stream %016x: the draft has no distribution at slot %d", job.stream_id, len(job.slots))
                self._finish(job)
                continue
            job.survival *= slot.confidence
            if job.slots and job.survival < job.least_survival:
                self._finish(job)
                continue
            job.slots.append(slot)
            sequence.tokens.append(slot.token)
            if slot.token in job.opened.params.stop_token_ids or self._is_done(job, sequence, now):
                self._finish(job)
        self.intake.flush()

    def fail(self, step: Step[list[Job]], error: Exception) -> None:
        for job in step.payload:
            if self.intake.jobs.get(job.stream_id) is job:
                self.intake.fail(job, f"the draft's step failed: {type(error).__name__}")
        self.intake.flush()

    def _is_done(self, job: Job, sequence: Sequence, now: float) -> bool:
        """Whether a job gets no further slot: it has all, its time is up, or the model cannot go on."""
        if now >= job.deadline_s or not self._is_readable(job, sequence):
            return True
        return len(job.slots) >= job.wanted > 0 or (job.wanted == 0 and sequence.pending == 0)

    def _is_readable(self, job: Job, sequence: Sequence) -> bool:
        """Whether the model can feed the stream: within its context, and no id that it lacks among the new tokens."""
        if len(sequence.tokens) > self._max_model_len:
            if sequence.committed > self._max_model_len:
                self._streams.kv.drop_cache(sequence)  # for good: a text never gets shorter
            return False
        return bool(job.slots) or max(sequence.tokens[sequence.cached :], default=0) < self._vocab_rows

    def _form(self, now: float) -> Step[list[Job]] | None:
        """The next step: all drafting streams first, then as much prompt as fits beside them."""
        jobs = sorted(self.intake.jobs.values(), key=self._is_prompt)
        spans: list[Span] = []
        riding: list[Job] = []
        rows_left = prompt_left = self._budget
        for job in jobs:
            is_prompt = self._is_prompt(job)
            if is_prompt and riding and prompt_left == self._budget:
                # A long prompt must not use up the deadlines of those that draft.
                drafting = self._budget - rows_left
                chunk = self._chunk.rows(drafting, 0, self._budget)
                prompt_left = max(min(self._budget // _PROMPT_SHARE, chunk), 1)
            room = min(rows_left, prompt_left) if is_prompt else rows_left
            if len(riding) == self._seats or room == 0:
                break
            sequence = self.intake.sequence(job)
            wanted = min(job.wanted, 1)
            self._streams.kv.rewind(sequence, min(sequence.cached, len(sequence.tokens) - wanted))
            if not sequence.blocks:
                if self._waits_for_prompt(sequence):
                    continue
                if not self.room.enter(job, sequence, now):
                    self._refuse(job)
                    continue
            span = sequence.span(wanted, min(room, self._rows_of(sequence, wanted)))
            if not self.room.extend(sequence, span.start + len(span.tokens), now):
                self._refuse(job)
                continue
            spans.append(span)
            riding.append(job)
            rows_left -= len(span.tokens)
            prompt_left -= len(span.tokens) if is_prompt else 0
        return Step(spans, riding, self._streams.kv.take_copies()) if spans else None

    def _is_prompt(self, job: Job) -> bool:
        return self.intake.sequence(job).pending > _CATCH_UP_ROWS

    @staticmethod
    def _rows_of(sequence: Sequence, wanted: int) -> int:
        """Rows that bring a stream up to its last token; at least the wanted one, which may have to be fed again."""
        return max(sequence.pending, wanted)

    def _waits_for_prompt(self, sequence: Sequence) -> bool:
        """Whether the prompt that a stream shares is still being read; it finds more of it when that is over."""
        parent = None if sequence.opened.fork_of is None else self.intake.jobs.get(sequence.opened.fork_of)
        return parent is not None and parent.owner == sequence.owner and self._is_prompt(parent)

    def _finish(self, job: Job) -> None:
        self.room.left(job.stream_id, self._clock())
        self.intake.finish(job)

    def _refuse(self, job: Job) -> None:
        """There is no room: what is done is answered, and where that is nothing, why."""
        if job.slots:
            self._finish(job)
        else:
            self.intake.refuse(job, "the draft's KV pool is full")
