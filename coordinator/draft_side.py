"""The draft as the decoder sees it: asked for proposals, brought up to date, timed, and left out when it fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from coordinator import decoding
from coordinator.config import DecoderConfig
from coordinator.costs import Costs
from coordinator.counters import Counters
from coordinator.decoding import ProposalAnswer
from coordinator.draft_admission import DraftAdmission
from coordinator.draft_health import DraftHealth
from coordinator.link import Link
from coordinator.links import DRAFT
from coordinator.parts import PartInfo, TargetFiles
from coordinator.patience import OVERDUE_FLOOR_S, Patience
from coordinator.rows import ProposeRow
from coordinator.state import Phase
from coordinator.streams import Registry, Stream
from outrider.errors import Status
from outrider.features import FeatureRequest
from outrider.seam import U32, Cut, ProposalBatch

CATCH_UP_TOKENS = 32
"""A draft that lacks more than this is brought up to date beside plain decoding, before it is asked."""
HOLD_S = 0.5
"""Seconds for which a stream whose proposal was overdue is decoded plainly."""


class DraftSide:
    """Owns the link to the draft. Streams that it cannot help are handed back through `plain`.

    Args:
        streams: all open streams.
        target: the target's tokenizer, None before a target was reached.
        proposed: takes answered proposals with at least one slot, and streams to decode plainly for one round.
        plain: takes streams whose proposal was given up.
    """

    def __init__(
        self,
        config: DecoderConfig,
        coordinator_id: bytes,
        streams: Registry,
        costs: Costs,
        counters: Counters,
        *,
        target: Callable[[], TargetFiles | None],
        proposed: Callable[[list[ProposalAnswer]], None],
        plain: Callable[[list[Stream]], None],
    ) -> None:
        self.health = DraftHealth()
        self.link: Link[ProposeRow, ProposalBatch] | None = None
        if config.draft is not None:
            wire = counters.wire["draft"]
            self.link = Link(DRAFT, config.draft, coordinator_id, self, config.tls, wire, config.resolve)
        self._streams = streams
        self._costs = costs
        self._counters = counters
        self._target = target
        self._proposed = proposed
        self._plain = plain
        self._admission = DraftAdmission(config, counters)
        self._patience = Patience(costs, streams)
        self._heard_s = 0.0
        self._probe: Stream | None = None

    @property
    def request(self) -> FeatureRequest | None:
        """The target's features that the draft builds on, if it does."""
        info = self.link.info if self.link is not None and self.link.is_up else None
        return info.features if info is not None else None

    # ---- asking ----

    def why_not(self, stream: Stream) -> str | None:
        """Why the stream cannot be drafted for now (a key of `Counters.draft_skipped`), or None.

        Starts whatever has to happen first: a catch-up of the draft's KV, or a trial of a draft that is out.
        """
        link, draft, now_s = self.link, stream.state.draft, time.monotonic()
        if link is None or not link.is_up:
            return "no_draft"
        if self.health.out_reason is not None:
            if self.health.may_probe(now_s) and draft.outstanding is None:
                self.health.probing, self._probe = True, stream
                self.catch_up(stream)
            return "out"
        if draft.outstanding is not None:
            return "catching_up"
        if now_s < stream.held_until_s:
            return stream.held_for
        if link.info is not None and 0 < link.info.max_model_len <= stream.state.committed:
            return "context"
        if self.request is not None:
            return None if stream.state.features.are_ready(stream.state.committed) else "no_features"
        if stream.state.committed - draft.held > CATCH_UP_TOKENS:
            self.catch_up(stream)
            return "catching_up"
        return None

    def catch_up(self, stream: Stream) -> None:
        """Brings the draft's KV up to date beside whatever the stream is doing."""
        if self.link is None or not self.link.is_up or stream.state.draft.outstanding is not None:
            return
        self._post(stream, decoding.catch_up(stream.state, stream_deadline_ms=stream.left_ms))
        limit_s = self._patience.of_catch_up()
        item = [(stream, stream.state.draft.generation)]
        asyncio.get_running_loop().call_later(limit_s, self._check_catch_up, item, limit_s)

    def ask(self, streams: Sequence[Stream], gammas: Sequence[int], least_survivals: Sequence[float]) -> None:
        """Asks for proposals; those of one call leave in one message and share one timer."""
        floor_s, limit_s = self._patience.floor_s, 0.0
        for stream, gamma, least_survival in zip(streams, gammas, least_survivals, strict=True):
            deadline_ms, overdue_s = self._patience.of_proposal(gamma, floor_s)
            limit_s = max(limit_s, overdue_s)
            row = decoding.propose(
                stream.state,
                gamma,
                draft_deadline_ms=deadline_ms,
                stream_deadline_ms=stream.left_ms,
                least_survival=least_survival,
            )
            self._post(stream, row)
            if stream.trace is not None:
                stream.trace.ask(gamma)
            self._counters.gamma[gamma] += 1
        waited_for = [(stream, stream.state.draft.generation) for stream in streams]
        loop = asyncio.get_running_loop()
        loop.call_later(limit_s, self._when_due, waited_for, limit_s, loop.time() + limit_s)

    def close(self, stream: Stream) -> None:
        """The stream ended: the draft frees what it holds of it."""
        if stream is self._probe:
            self.health.probing, self._probe = False, None  # its answer will go unread; the next stream tries
        if self.link is not None and stream.state.draft.opened:
            self.link.close_stream(stream.state.stream_id)

    def fault(self, cut: Cut) -> None:
        """The target found a fault in a proposal."""
        if cut is Cut.LYING_DRAFT:
            self._counters.draft_failures["lying"] += 1
            reason = "its drawn tokens contradict its declared q; restart it to have it tried again"
            self.health.take_out(reason, time.monotonic(), banned=True)
            self._abandon()
        elif cut is Cut.MALFORMED_Q:
            self._counters.draft_failures["malformed_q"] += 1
            if self.health.strike("it declared a q that is no distribution", time.monotonic()):
                self._abandon()

    def _post(self, stream: Stream, row: ProposeRow) -> None:
        assert self.link is not None
        stream.asked_s = time.monotonic()
        self.link.post(stream.state.stream_id, row)

    # ---- listening ----

    async def admit(self, link: Link[ProposeRow, ProposalBatch], info: PartInfo) -> U32:
        """As `DraftAdmission.admit`."""
        return await self._admission.admit(link, info, self._target())

    def up(self, link: Link[ProposeRow, ProposalBatch], *, new_instance: bool) -> None:
        if new_instance:
            self.health.reset()
            for stream in self._streams:
                stream.state.forget_draft()

    def down(self, link: Link[ProposeRow, ProposalBatch], reason: str, *, nonsense: bool) -> None:
        self._counters.draft_failures["unreadable" if nonsense else "link_lost"] += 1
        self.health.probing = False
        if nonsense:
            self.health.take_out(reason, time.monotonic())
        self._abandon()

    def received(self, link: Link[ProposeRow, ProposalBatch], batch: ProposalBatch) -> None:
        answers = decoding.receive_proposals(self._streams.states, batch)
        now_s = self._heard_s = time.monotonic()
        proposed: list[ProposalAnswer] = []
        plain: list[Stream] = []
        slowest_s: dict[int, float] = {}
        for answer in answers:
            stream = self._streams[answer.state.stream_id]
            link.done(answer.state.stream_id)
            self._counters.count_note("draft", answer.note)
            drafting = answer.state.phase is Phase.DRAFTING
            if answer.status is Status.OK and answer.proposal.slots <= (answer.state.asked if drafting else 0):
                self.health.good()
                if drafting:
                    proposed.append(answer)
                    if stream.trace is not None:
                        stream.trace.proposed(answer.proposal.slots, batch.timings)
                    asked, took_s = answer.state.asked, now_s - stream.asked_s
                    slowest_s[asked] = max(slowest_s.get(asked, 0.0), took_s)
                continue
            self._refusal(stream, answer, now_s)
            if drafting:
                _back_to_plain(stream)
                plain.append(stream)
        for asked, took_s in slowest_s.items():
            self._costs.draft.observe(asked, took_s)
        if answers:
            for observer in self._counters.on_step:
                observer("draft", batch.timings)
        if proposed:
            self._proposed(proposed)
        if plain:
            self._plain(plain)

    def _refusal(self, stream: Stream, answer: ProposalAnswer, now_s: float) -> None:
        """What an item that was not served says about the draft."""
        draft, status = answer.state.draft, answer.status
        self.health.probing = False
        if status in (Status.NOT_FOUND, Status.ABORTED):
            answer.state.forget_draft()
        elif status is Status.FAILED_PRECONDITION and answer.proposal.draft_cached < draft.held:
            draft.give_up(held=answer.proposal.draft_cached)
        elif status in (Status.RESOURCE_EXHAUSTED, Status.UNAVAILABLE):
            draft.give_up()
            stream.hold(now_s + HOLD_S, "kv" if status is Status.RESOURCE_EXHAUSTED else "held")
        else:
            answer.state.forget_draft()
            stream.hold(now_s + HOLD_S)
            self._counters.draft_failures["error"] += 1
            message = answer.message or f"{answer.proposal.slots} slots instead of {answer.state.asked}"
            if self.health.strike(f"it answered {status.name}: {message}", now_s):
                self._abandon()

    # ---- giving up ----

    def _when_due(self, waited_for: Sequence[tuple[Stream, int]], limit_s: float, due_s: float) -> None:
        """A loop that was held up gets to read what came meanwhile, lest its own hiccup pass for one of the draft's."""
        loop = asyncio.get_running_loop()
        if loop.time() - due_s > OVERDUE_FLOOR_S:
            loop.call_later(OVERDUE_FLOOR_S, self._check_overdue, waited_for, limit_s)
        else:
            self._check_overdue(waited_for, limit_s)

    def _check_catch_up(self, item: Sequence[tuple[Stream, int]], limit_s: float) -> None:
        """A prefill may take long; only a draft that says nothing at all meanwhile is taken to hang.

        Prompts that were posted after this one may ride in the same step, so the limit grows with them.
        """
        loop = asyncio.get_running_loop()
        if self._heard_s > item[0][0].asked_s:
            loop.call_later(limit_s, self._check_overdue, item, 2 * limit_s)
        elif (all_s := self._patience.of_catch_up()) > limit_s:
            loop.call_later(all_s - limit_s, self._check_catch_up, item, all_s)
        else:
            self._check_overdue(item, limit_s)

    def _check_overdue(self, waited_for: Sequence[tuple[Stream, int]], limit_s: float) -> None:
        """Gives up what has not been answered by now; several items of one message are one failure."""
        overdue = [
            stream
            for stream, generation in waited_for
            if stream.state.draft.outstanding is not None
            and stream.state.draft.generation == generation
            and time.monotonic() - stream.asked_s >= limit_s * 0.99
        ]
        if not overdue:
            return
        now_s = time.monotonic()
        self._counters.draft_failures["overdue"] += len(overdue)
        for gamma in {stream.state.asked for stream in overdue if stream.state.phase is Phase.DRAFTING}:
            # It took at least this long; unless this is learnt, a draft that became slower stays overdue for ever.
            self._costs.draft.observe(gamma, limit_s)
        plain = self._give_up(overdue)
        for stream in overdue:
            stream.hold(now_s + HOLD_S)
        if self.health.out_reason is not None:
            self.health.probe_failed(now_s)
        elif self.health.strike(f"no answer within {1_000 * limit_s:.0f} ms, twice in a row", now_s):
            plain += self._give_up(list(self._streams))
        self._plain(plain)

    def _abandon(self) -> None:
        """Waits for the draft no longer, in any stream."""
        if plain := self._give_up(list(self._streams)):
            self._plain(plain)

    def _give_up(self, streams: Sequence[Stream]) -> list[Stream]:
        """Drops outstanding items; returns the streams that were waiting for one."""
        drafting = []
        for stream in streams:
            state = stream.state
            if state.draft.outstanding is None:
                continue
            if self.link is not None:
                self.link.withdraw(state.stream_id)
            if state.phase is Phase.DRAFTING:
                _back_to_plain(stream)
                drafting.append(stream)
            else:
                state.draft.give_up()
        return drafting


def _back_to_plain(stream: Stream) -> None:
    decoding.back_to_plain(stream.state)
    if stream.trace is not None:
        stream.trace.gave_up()
