"""Decoder: the decoding loop with its links, usable in any process that runs asyncio.

Every stream goes its own way (`decoding`); a batch is what one turn of the event loop collected for one link. A
target's message ends the rounds of many streams at once: what they ask of the draft leaves as one message, and so do
the proposals that come back. Nothing waits for all streams.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

from coordinator import round_end
from coordinator.acceptance_watch import AcceptanceWatch
from coordinator.attachment import attachment
from coordinator.config import DecoderConfig
from coordinator.costs import Costs
from coordinator.counters import Counters
from coordinator.decoding import ProposalAnswer, VerdictAnswer
from coordinator.draft_side import HOLD_S, DraftSide
from coordinator.link import Link
from coordinator.parts import DecoderState
from coordinator.planted import drop_after_look
from coordinator.profiles import Profiles
from coordinator.request import DecodingRequest, Emission, StreamStats
from coordinator.round_plan import RoundPlan
from coordinator.state import Phase, new_stream
from coordinator.streams import Registry, Stream
from coordinator.target_side import TargetSide
from outrider.errors import DeadlineExceeded, InvalidArgument, OutriderError, Unavailable
from outrider.seam import Cut

__all__ = ["Decoder", "DecoderConfig", "DecodingRequest", "Emission", "Stream", "StreamStats"]

logger = logging.getLogger(__name__)

_WATCH_S = 0.25


class Decoder:
    """Decodes many streams with one draft service and one or more target replicas.

    Used from one event loop only: the one in which `start` was called.

    Attributes:
        counters: raw counts since it was made.
        costs: what steps and proposals take, as far as it is known.
    """

    def __init__(self, config: DecoderConfig) -> None:
        coordinator_id = os.urandom(16)
        self.counters = Counters()
        self._config = config
        self._streams = Registry()
        costs = Costs()
        self._target = TargetSide(
            config,
            coordinator_id,
            self._streams,
            costs,
            self.counters,
            settled=self._settled,
            failed=self._fail,
            arrived=self._begin,
        )
        self._draft = DraftSide(
            config,
            coordinator_id,
            self._streams,
            costs,
            self.counters,
            target=lambda: self._target.files,
            proposed=self._proposed,
            plain=self._next_rounds,
        )
        self.costs = costs
        self._acceptance = AcceptanceWatch(config.acceptance_baseline)
        self._profiles = Profiles(costs, self._target.links, self._draft.link, self._streams)
        self._plan = RoundPlan(config, self._streams, costs, self._target, self._draft)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.TimerHandle | None = None

    # ---- life ----

    async def start(self) -> None:
        """Begins to connect; does not wait for anything, streams do."""
        self._loop = asyncio.get_running_loop()
        for link in self._target.links:
            link.start()
        if self._draft.link is not None:
            self._draft.link.start()
        self._watch = self._loop.call_later(_WATCH_S, self._on_watch)

    async def close(self) -> None:
        """Ends all streams and links."""
        for stream in list(self._streams):
            self._fail(stream, Unavailable("the coordinator is shutting down"))
        if self._watch is not None:
            self._watch.cancel()
        links: list[Link[Any, Any]] = [*self._target.links]
        if self._draft.link is not None:
            links.append(self._draft.link)
        await asyncio.gather(*(link.close() for link in links))

    async def tokenizer_files(self) -> dict[str, bytes]:
        """The target's tokenizer, file name -> content.

        Raises:
            Unavailable: no target has been reached yet.
        """
        if self._target.files is None:
            raise Unavailable("no target has been reached yet")
        return dict(self._target.files.files)

    @property
    def state(self) -> DecoderState:
        """What the decoder is attached to now."""
        return attachment(self._target, self._draft, self._acceptance)

    # ---- streams ----

    def open(self, request: DecodingRequest) -> Stream:
        """Begins an answer; while no target is up it waits for one, until its deadline.

        Raises:
            InvalidArgument: the prompt is empty, or there is no room behind it.
            RuntimeError: called outside the event loop that `start` was called in.
        """
        if self._loop is None or asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a Decoder belongs to the event loop in which it was started")
        if not request.prompt_ids:
            raise InvalidArgument("prompt", "must have at least one token")
        asked = request.num_speculative_tokens
        if asked is not None and not 0 <= asked <= self._config.largest_gamma:
            raise InvalidArgument(
                "num_speculative_tokens", f"must be from 0 to {self._config.largest_gamma}, got {asked}"
            )
        if not request.deadline_s > 0:
            raise InvalidArgument("deadline_s", f"must be positive, got {request.deadline_s}")
        seed = request.seed if request.seed is not None else secrets.randbits(64)
        state = new_stream(secrets.randbits(64), request, seed)
        stream = Stream(state, time.monotonic() + request.deadline_s, self._close)
        stream.deadline = self._loop.call_later(
            request.deadline_s, self._fail, stream, DeadlineExceeded(f"not finished within {request.deadline_s:g} s")
        )
        self._streams.add(stream)
        self.counters.streams_opened += 1
        if self._target.place(stream):
            self._begin([stream])
        return stream

    def _begin(self, streams: Sequence[Stream]) -> None:
        """The first round is plain, so that target and draft read the prompt at the same time."""
        info = self._target.info
        for stream in streams:
            if stream.state.generated:
                self._next_rounds([stream])
                continue
            if info is not None and round_end.room(stream.state, info.max_model_len) < 1:
                length = len(stream.state.request.prompt_ids)
                error = InvalidArgument("prompt", f"has {length} tokens, no room for an answer in {info.max_model_len}")
                self._fail(stream, error)
                continue
            reason = "off" if self._plan.wanted(stream) == 0 else self._draft.why_not(stream)
            if reason not in (None, "catching_up", "no_features"):
                self.counters.draft_skipped[reason] += 1
                self._target.run(stream, self._config.run_credit)
                continue
            if self._draft.request is None:
                self._draft.catch_up(stream)
            self._target.run(stream, 1, self._draft.request)

    def _close(self, stream: Stream) -> None:
        """Frees everything of a stream, once."""
        if not self._streams.remove(stream):
            return
        self.counters.streams_ended += 1
        if stream.deadline is not None:
            stream.deadline.cancel()
        if stream.trace is not None:
            stream.trace.close()
        self._target.close(stream)
        self._draft.close(stream)
        self._plan.controller.forget(stream.state.stream_id)
        stream.state.phase = Phase.CLOSED
        stream.state.target.outstanding = stream.state.draft.outstanding = None

    def _fail(self, stream: Stream, error: OutriderError) -> None:
        stream.end(error)
        self._close(stream)

    # ---- rounds ----

    def _settled(self, answers: list[VerdictAnswer]) -> None:
        """Rounds have ended: emit, count, and start the next ones."""
        ready: dict[int, Stream] = {}  # several tokens of one run may come in one message; one round follows them
        for answer in answers:
            state, emission, tally = answer.state, answer.emission, answer.round
            assert emission is not None
            stream = self._streams[state.stream_id]
            stream.push(emission)
            self.counters.count_round(len(emission.tokens), *tally)
            self.counters.count_note("target", answer.note)
            if tally.drafted:
                self._acceptance.add(state.request, tally.tested, tally.accepted)
            else:
                self.counters.gamma[0] += 1
            asked = state.asked if tally.drafted else 0
            self._plan.controller.finished(state.stream_id, asked, tally.drafted, tally.accepted)
            if answer.cut is not Cut.NONE:
                self._draft.fault(answer.cut)
            if emission.finish_reason is not None:
                stream.end()
                self._close(stream)
            elif state.phase is Phase.OPENED:
                if state.features.missed:
                    stream.hold(time.monotonic() + HOLD_S)
                ready[state.stream_id] = stream
            elif state.phase is Phase.RUNNING:
                self._top_up(stream)
        if ready:
            self._next_rounds(list(ready.values()))

    def _proposed(self, answers: list[ProposalAnswer]) -> None:
        """Proposals are there: have them verified as they are; where there is none, draw one token plainly."""
        for answer in answers:
            state, stream = answer.state, self._streams[answer.state.stream_id]
            proposal = drop_after_look(state, answer.proposal)
            if proposal.slots:
                self._target.verify(stream, proposal, self._draft.request)
            else:
                self.counters.draft_skipped["empty"] += 1
                self._plan.controller.finished(state.stream_id, state.asked, 0, 0)
                self._target.run(stream, 1, self._draft.request)

    def _next_rounds(self, streams: Sequence[Stream]) -> None:
        """Starts a round for each: drafted if it can be and is worth it, else plain."""
        drafting, limits = [], []
        for stream in streams:
            stream.draining = False
            reason, limit = self._plan.draft_limit(stream)
            if reason is None:
                drafting.append(stream)
                limits.append(limit)
                continue
            self.counters.draft_skipped[reason] += 1
            if reason == "no_features" and self._plan.drafts_next(stream):
                self._target.run(stream, 1, self._draft.request)
            else:
                self._target.run(stream, self._plan.credit(reason))
        if not drafting:
            return
        gammas = self._plan.gammas(drafting, limits)
        for stream, gamma in zip(drafting, gammas, strict=True):
            if gamma == 0:
                self.counters.draft_skipped["gamma_0"] += 1
                self._target.run(stream, self._config.run_credit)
        asked = [(stream, gamma) for stream, gamma in zip(drafting, gammas, strict=True) if gamma]
        if asked:
            self._draft.ask(
                [stream for stream, _ in asked],
                [gamma for _, gamma in asked],
                [self._plan.least_survival(stream) for stream, _ in asked],
            )

    def _top_up(self, stream: Stream) -> None:
        """Extends a plain run that is half used up, or lets it drain because the stream is to draft again."""
        state, info = stream.state, self._target.info
        left = state.run_end - state.committed
        if stream.draining or info is None or left > self._config.run_credit // 2:
            return
        # In this order: asking whether it could be drafted brings the draft's KV up to date, at the cost of a pass.
        reason = self._plan.draft_limit(stream)[0] if self._plan.drafts_next(stream) else "gamma_0"
        if reason in (None, "no_features"):
            stream.draining = True
        elif left <= self._plan.credit(reason) // 2 and left < round_end.room(state, info.max_model_len):
            self._target.run(stream, self._plan.credit(reason))

    def _on_watch(self) -> None:
        if self._loop is not None:
            self._watch = self._loop.call_later(_WATCH_S, self._on_watch)
        now_s = time.monotonic()
        self._target.watch(now_s)
        self._profiles.watch(now_s)
        draft = self._draft.link
        target_info = next((link.info for link in self._target.links if link.is_up), None)
        self._acceptance.pair(target_info, draft.info if draft is not None and draft.is_up else None)
