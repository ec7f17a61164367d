"""Verifier: the engine thread's worker. The scheduler decides who rides in a step; this accounts for what came of it.

One step, in order:

1. `plan` asks the scheduler for the pieces of the step and turns each into a span of tokens: prompt, what was committed
   since the last round, and x_1 .. x_m. Logits are wanted for the last m + 1 of them.
2. The model computes the spans of all streams in one ragged pass.
3. `finish` judges all rounds of the step together (`scoring.judge`) and answers each. Nothing is rolled back here: the
   next item's `sync` keeps what was accepted and cuts the rest.
4. A plain run takes its own token as committed and goes on, one token per step, until its credit is used up.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from outrider.engine.batch import Span
from outrider.engine.block_manager import BlockManager
from outrider.engine.formation import Piece
from outrider.engine.grammar import Grammars
from outrider.engine.runner import Step, StepTiming, Wait
from outrider.engine.scheduler import Scheduler
from outrider.engine.streams import Streams
from outrider.errors import OutriderError, Overloaded
from outrider.features import NOT_WANTED, FeatureBlock
from outrider.logprobs import LogprobRows
from outrider.seam import Timings
from target_service.answers import Answer, Outbox
from target_service.features import FeatureKeeper, Fed, HiddenStates
from target_service.intake import Intake, Message
from target_service.item import Stream, stops
from target_service.kv_pool import KVPool
from target_service.round import Round, Verdict
from target_service.scored_rows import ScoredRows
from target_service.scoring import accepted_at_most, judge

log = logging.getLogger(__name__)

Pieces = Sequence[Piece]


class Limits(NamedTuple):
    """What bounds a step and a stream: see `EngineConfig`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Verifier:
    """Serves the items of all links from one model. Used in the engine thread only.

    Args:
        block_manager: of the model's KV.
        vocab: rows of the model's output.
        drawable: ids below this one may be drawn; rows behind it are padding that no tokenizer has a text for.
        limits: of a step and a stream.
        lease_s: seconds for which the streams of a lost link are kept.
        hidden_states: of the model; None for one that has none to give to drafts.
        allow_planted_errors: whether streams may ask for errors on purpose.
        grammars: constrain what streams with one may draw.
        clock: `time.monotonic`, as the links stamp arrivals with it.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        vocab: int,
        drawable: int,
        limits: Limits,
        lease_s: float,
        hidden_states: HiddenStates | None = None,
        allow_planted_errors: bool = False,
        grammars: Grammars,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.streams = Streams(
            block_manager, lease_s, clock, allow_planted_errors=allow_planted_errors, matcher=grammars.matcher
        )
        self.scheduler = Scheduler(
            KVPool(block_manager, self.streams, lambda stream_id: self._intake[stream_id]),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            clock=clock,
        )
        self._clock = clock
        self._drawable = drawable
        self._outbox = Outbox()
        self.features = FeatureKeeper(hidden_states)
        self._intake = Intake(
            self.streams, self.scheduler, self._outbox, self.features, vocab=vocab, max_model_len=limits.max_model_len
        )

    def receive(self, message: Message) -> None:
        """Takes in a message of a link."""
        self._intake.receive(message)

    def plan(self) -> Step[Pieces] | Wait | None:
        """The next step, or how long to wait for it."""
        self._intake.expire()
        formation = self.scheduler.form()
        for stream_id in formation.refused:
            self._intake.end(stream_id, Overloaded("the stream is longer than the whole KV pool"))
        self._outbox.flush()
        if formation.pieces:
            spans = [self._span(piece) for piece in formation.pieces]
            return Step(spans, formation.pieces, self.streams.kv.take_copies())
        if formation.wait_s is not None:
            return Wait(formation.wait_s)
        # Streams end with their lease or deadline even if no message comes.
        until = self.streams.next_end - self._clock()
        return None if math.isinf(until) else Wait(until)

    def finish(self, step: Step[Pieces], logits: torch.Tensor, timing: StepTiming) -> None:
        """Judges and answers the rounds that the step completed."""
        complete: list[tuple[Piece, Stream]] = []
        fed: list[Fed] = []
        row = 0
        scored = ScoredRows(logits.shape[0])
        for piece, span in zip(step.payload, step.spans, strict=True):
            stream = self._intake[piece.stream_id]
            scored.add(stream, span, last=piece.last)
            stream.sequence.fed(span)
            self.streams.kv.publish(stream.sequence)
            if stream.ring is not None:
                fed.append(Fed(stream.ring, span, row))
            row += len(span.tokens)
            if piece.last:
                complete.append((piece, stream))
        self.features.record(fed)
        raw = scored.raw(logits)
        if self._drawable < logits.shape[1]:
            logits[:, self._drawable :] = -math.inf
        rounds = [_round(stream) for _, stream in complete]
        verdicts = judge(scored.judged(logits), rounds) if rounds else []
        logprobs = scored.take(raw, rounds, verdicts) if raw is not None else {}
        forward_ms = timing.measure()  # Not before the verdicts are there: until then it would mean waiting twice.
        now = self._clock()
        queue_s = sum(timing.started - stream.item.ready_s for _, stream in complete if stream.item is not None)
        timings = Timings(
            queue_ms=1_000 * queue_s / max(len(complete), 1),
            forward_ms=forward_ms,
            sample_ms=max(1_000 * (now - timing.started) - forward_ms, 0.0),
            total_ms=1_000 * (queue_s / max(len(complete), 1) + now - timing.started),
            step_streams=timing.streams,
            step_tokens=timing.tokens,
        )
        self.scheduler.ran(step.payload, now - timing.started)
        for (piece, stream), verdict in zip(complete, verdicts, strict=True):
            if isinstance(verdict, OutriderError):
                self._end_unfindable(piece.stream_id, verdict)
            else:
                self._answer(piece.stream_id, stream, verdict, logprobs.get(piece.stream_id))
        self._outbox.flush(timings)

    def fail(self, step: Step[Pieces], error: Exception) -> None:
        """Ends the streams of a step that failed: what their KV holds is unknown."""
        for piece in step.payload:
            if piece.stream_id in self.streams:
                self._end_unfindable(piece.stream_id, OutriderError(f"the step failed: {error}"))
        self._outbox.flush()

    def _end_unfindable(self, stream_id: int, error: OutriderError) -> None:
        """Ends a stream whose KV may be spoilt: no other one finds it."""
        self.streams.kv.rewind(self._intake[stream_id].sequence, 0)
        self._intake.end(stream_id, error)

    def _span(self, piece: Piece) -> Span:
        stream = self._intake[piece.stream_id]
        span = stream.sequence.span(stream.tail, limit=None if piece.last else piece.rows)
        return span._replace(wanted=len(span.tokens)) if stream.scores_prompt else span

    def _answer(self, stream_id: int, stream: Stream, verdict: Verdict, logprobs: LogprobRows | None) -> None:
        item, sequence, key = stream.item, stream.sequence, stream.key
        assert item is not None, "only outstanding items ride in a step"
        at_prompt = stream.prompt is not None and key.committed == stream.opened.prompt_length
        answer = Answer(
            stream_id,
            *key,
            sequence.cached,
            verdict,
            item.proposal.cut,
            features=_features(stream, verdict),
            logprobs=logprobs,
            note=sequence.take_note(),
            prompt_logprobs=stream.prompt.rows() if stream.prompt is not None and at_prompt else None,
        )
        self._outbox.add(item.link, answer)
        stream.answered = key
        if not item.run_end:
            self._intake.done(stream_id)
            return
        sequence.tokens.append(verdict.bonus)
        sequence.committed += 1
        if stops(stream.opened.params, verdict.bonus):
            stream.run = None
            self._intake.done(stream_id)
        elif sequence.committed >= item.run_end:
            self._intake.done(stream_id)
        else:
            item.ready_s = self._clock()
            self.scheduler.submit(stream_id, stream.work(), arrived_s=item.ready_s)


def _round(stream: Stream) -> Round:
    assert stream.item is not None, "only outstanding items ride in a step"
    sequence = stream.sequence
    return Round(
        stream.opened, sequence.tokens, sequence.committed, stream.item.proposal, sequence.matcher, sequence.counts
    )


def _features(stream: Stream, verdict: Verdict) -> FeatureBlock | None:
    """What the draft needs for its next proposal, if this is the item's last answer."""
    item, sequence = stream.item, stream.sequence
    if item is None or stream.ring is None or item.features_from == NOT_WANTED:
        return None
    if item.run_end > sequence.committed + 1:
        return None
    return stream.ring.block(
        item.features_from, sequence.committed + accepted_at_most(stream.opened, item.proposal, verdict)
    )
