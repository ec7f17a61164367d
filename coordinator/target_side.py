"""The targets as the decoder sees them: streams are placed, items posted and posted again, silence is noticed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from coordinator import decoding, round_end
from coordinator.config import DecoderConfig
from coordinator.costs import Costs
from coordinator.counters import Counters
from coordinator.decoding import VerdictAnswer
from coordinator.link import Link
from coordinator.links import TARGET
from coordinator.parts import PartInfo, TargetFiles
from coordinator.rows import VerifyRow
from coordinator.silence import Silence
from coordinator.state import Phase, Proposal
from coordinator.streams import Registry, Stream
from outrider.errors import InvalidArgument, Mismatch, OutriderError, Status, Unavailable
from outrider.features import FeatureRequest
from outrider.sampling import SamplingParams
from outrider.seam import U32, Timings, VerdictBatch

logger = logging.getLogger(__name__)

TargetLink = Link[VerifyRow, VerdictBatch]

GIVE_UP_FACTOR = 10.0
"""An item alone is posted again after so many times what its target may be silent for."""
BUSY_RETRY_S = (0.05, 1.0)
"""Pause before an item that the target had no room for is posted again, first and at most."""
MAX_REFUSALS = 8
"""Refusals in a row of one item, without a word on room, that a stream survives."""


class _Fingerprint(NamedTuple):
    weight_hash: str
    tokenizer_hash: str
    vocab_rows: int


class TargetSide:
    """Owns the links to the targets.

    Args:
        streams: all open streams.
        settled: takes the answers of a message that committed tokens.
        failed: takes a stream that cannot go on, and why.
        arrived: takes streams that were waiting for a target and have one now, before their first round.
    """

    def __init__(
        self,
        config: DecoderConfig,
        coordinator_id: bytes,
        streams: Registry,
        costs: Costs,
        counters: Counters,
        *,
        settled: Callable[[list[VerdictAnswer]], None],
        failed: Callable[[Stream, OutriderError], None],
        arrived: Callable[[list[Stream]], None],
    ) -> None:
        wire = counters.wire["target"]
        self.links = [
            Link(TARGET, address, coordinator_id, self, config.tls, wire, config.resolve) for address in config.target
        ]
        self.files: TargetFiles | None = None
        self.last_verdict_s: float | None = None
        self._streams = streams
        self._costs = costs
        self._counters = counters
        self._settled = settled
        self._failed = failed
        self._arrived = arrived
        self._silence = {link: Silence(costs.target) for link in self.links}

    @property
    def info(self) -> PartInfo | None:
        """Of the first target that is up, or that was."""
        infos = [link.info for link in self.links if link.is_up] or [self.files.info if self.files else None]
        return infos[0]

    # ---- posting ----

    def verify(self, stream: Stream, proposal: Proposal, request: FeatureRequest | None = None) -> None:
        """Has a proposal verified, now or when there is a target."""
        link = self._place(stream)
        row = decoding.verify(stream.state, proposal, stream_deadline_ms=stream.left_ms, request=request)
        if stream.trace is not None:
            stream.trace.verify(proposal.slots)
        self._post(link, stream, row)

    def run(self, stream: Stream, credit: int, request: FeatureRequest | None = None) -> None:
        """Has up to `credit` tokens drawn plainly, as far as there is room, now or when there is a target."""
        link, info = self._place(stream), self.info
        room = round_end.room(stream.state, info.max_model_len) if info is not None else credit
        row = decoding.run(stream.state, min(credit, room), stream_deadline_ms=stream.left_ms, request=request)
        if stream.trace is not None:
            stream.trace.run()
        self._post(link, stream, row)

    def place(self, stream: Stream) -> bool:
        """Finds the stream a target; False while none is up."""
        return self._place(stream) is not None

    def close(self, stream: Stream) -> None:
        """The stream ended: the target frees what it holds of it."""
        if stream.link is not None and stream.state.target.opened:
            stream.link.close_stream(stream.state.stream_id)

    def _place(self, stream: Stream) -> TargetLink | None:
        if stream.link is not None and stream.link.is_up:
            return stream.link
        up = [link for link in self.links if link.is_up]
        if not up:
            return None
        up = [link for link in up if not link.is_draining] or up
        load = dict.fromkeys(up, 0)
        for other in self._streams:
            if other.link in load:
                load[other.link] += 1
        if stream.link is not None:
            self.close(stream)
            stream.state.target.forget()
        parent = self._streams.get(stream.state.fork_of)
        # Samples of one prompt go where it has been read.
        stream.link = parent.link if parent is not None and parent.link in load else min(up, key=load.__getitem__)
        return stream.link

    def _post(self, link: TargetLink | None, stream: Stream, row: VerifyRow) -> None:
        """Sends a row. The stream was placed before the row was made, for a row is made for one target's knowledge."""
        if link is None:
            # The row is not sent; if it was to open the stream, that is still to be done.
            if stream.link is None:
                stream.state.target.forget()
            else:
                stream.state.target.give_up()
            return
        stream.posted_s = time.monotonic()
        link.post(stream.state.stream_id, row)

    def _post_again(self, stream: Stream) -> None:
        """The round in flight once more: the same x and q, or what is left of the run."""
        if stream.state.phase not in (Phase.VERIFYING, Phase.RUNNING):
            return
        link = self._place(stream)
        if link is not None:
            self._counters.reopened += not stream.state.target.opened
            if stream.trace is not None:
                stream.trace.sent_again()
            self._post(link, stream, decoding.resend(stream.state, stream_deadline_ms=stream.left_ms))

    # ---- listening ----

    async def admit(self, link: TargetLink, info: PartInfo) -> U32:
        """Takes targets of one model: that of the first one reached, whose tokenizer others have taken."""
        if self.files is None:
            files = await link.tokenizer_files()
            if self.files is None:  # another link may have been as fast
                self.files = TargetFiles(files, info)
        used = self.files.info
        if _fingerprint(info) != _fingerprint(used):
            raise Mismatch(
                f"serves another model ({info.model_id}) than the one in use ({used.model_id}); "
                "restart the coordinator to change over"
            )
        if info.arithmetic != used.arithmetic:  # a stream that changes over would go on in other bits, and other words
            raise Mismatch(
                f"computes in {info.arithmetic}, and the target in use in {used.arithmetic}; start all targets alike, "
                "or restart the coordinator to change over"
            )
        return np.empty(0, np.uint32)

    def up(self, link: TargetLink, *, new_instance: bool) -> None:
        waiting = []
        for stream in self._streams:
            if stream.link is link and new_instance:
                stream.state.target.forget()
            if stream.link is None or stream.link is link or not stream.link.is_up:
                if stream.state.phase is Phase.OPENED and self._place(stream) is not None:
                    waiting.append(stream)
                elif stream.state.target.outstanding is None:
                    self._post_again(stream)
        if waiting:
            self._arrived(waiting)

    def down(self, link: TargetLink, reason: str, *, nonsense: bool) -> None:
        for stream in self._streams:
            if stream.link is link:
                stream.state.target.give_up()
                # Another replica takes over at once; with none, the stream waits for this one.
                if any(other.is_up for other in self.links):
                    self._post_again(stream)

    def received(self, link: TargetLink, batch: VerdictBatch) -> None:
        info = self.files.info if self.files is not None else None
        now_s = time.monotonic()
        answers = decoding.receive_verdicts(self._streams.states, batch, info.max_model_len if info else 0)
        if not answers:
            return
        self.last_verdict_s = now_s
        self._silence[link].heard(now_s)
        self._learn(self._streams[answers[0].state.stream_id], batch, now_s)
        settled, refused = [], []
        for answer in answers:
            stream = self._streams[answer.state.stream_id]
            if answer.state.target.outstanding is None:
                link.done(answer.state.stream_id)
            if answer.emission is not None:
                stream.posted_s, stream.refusals = now_s, 0
                settled.append(answer)
            else:
                refused.append((stream, answer))
        # A refusal may end its stream, whose earlier tokens are to be read before.
        if settled:
            if any(self._streams[answer.state.stream_id].trace is not None for answer in settled):
                self._trace(settled, batch.timings)
            self._settled(settled)
        for stream, answer in refused:
            self._refused(stream, answer)

    def _trace(self, settled: list[VerdictAnswer], timings: Timings) -> None:
        """A message may hold several tokens of a plain run; its round ends with the last of them."""
        streams = {answer.state.stream_id: self._streams[answer.state.stream_id] for answer in settled}
        for answer in settled:
            trace, emission = streams[answer.state.stream_id].trace, answer.emission
            if trace is not None and emission is not None:
                trace.committed(len(emission.tokens), answer.round.drafted, answer.round.accepted)
        for stream in streams.values():
            if stream.trace is not None and stream.state.phase is not Phase.RUNNING:
                stream.trace.settled(timings)

    def _learn(self, stream: Stream, batch: VerdictBatch, now_s: float) -> None:
        timings = batch.timings
        for observer in self._counters.on_step:
            observer("target", timings)
        if timings.step_tokens:
            self._costs.target.observe(timings.step_tokens, (timings.forward_ms + timings.sample_ms) / 1_000)
            self._costs.observe_rows(timings.step_tokens, int(batch.slots_done.sum()) + len(batch.replies))
            self._costs.observe_link(now_s - stream.posted_s - timings.total_ms / 1_000)

    def _refused(self, stream: Stream, answer: VerdictAnswer) -> None:
        """An item that was not served: posted again where that can help, else the end of the stream."""
        target, status = stream.state.target, answer.status
        stream.refusals += 1
        if status in (Status.RESOURCE_EXHAUSTED, Status.UNAVAILABLE):
            target.give_up()
            pause_s = min(BUSY_RETRY_S[0] * 2.0 ** min(stream.refusals, 10), BUSY_RETRY_S[1])
            generation = target.generation
            asyncio.get_running_loop().call_later(pause_s, self._retry, stream, generation)
        elif status in (Status.NOT_FOUND, Status.ABORTED) and stream.refusals < MAX_REFUSALS:
            target.forget()
            self._post_again(stream)
        elif status is Status.FAILED_PRECONDITION and stream.refusals < MAX_REFUSALS:
            if answer.cached_length < target.held:
                target.give_up(held=answer.cached_length)
            else:
                target.forget()
            self._post_again(stream)
        elif status is Status.INVALID_ARGUMENT:
            field, _, problem = answer.message.partition(": ")
            if field in SamplingParams.__dataclass_fields__:
                self._failed(stream, InvalidArgument(field, problem))
            else:
                self._failed(stream, InvalidArgument("request", f"refused by the target: {answer.message}"))
        elif status in (Status.NOT_FOUND, Status.ABORTED, Status.FAILED_PRECONDITION):
            # What these say is between the parts: to a client NOT_FOUND would mean its model.
            self._failed(stream, Unavailable(f"the target does not keep the stream: {answer.message}"))
        else:
            error = OutriderError(f"the target answered {status.name}: {answer.message}")
            error.status = status
            self._failed(stream, error)

    def _retry(self, stream: Stream, generation: int) -> None:
        if stream.state.target.generation == generation and stream.state.target.outstanding is None:
            self._post_again(stream)

    # ---- silence ----

    def watch(self, now_s: float) -> None:
        """Restarts the links of targets that owe an answer for too long; called a few times per second."""
        for link in self.links:
            if not link.is_up:
                continue
            silence = self._silence[link]
            owed = [s for s in self._streams if s.link is link and s.state.target.outstanding is not None]
            limit_s = silence.limit_s([stream.state for stream in owed])
            if limit_s is None:
                continue
            oldest_s = min(stream.posted_s for stream in owed)
            if now_s - max(silence.heard_s, link.changed_s, oldest_s) > limit_s:
                silence.broken()
                link.restart(f"no answer for {limit_s:.1f} s; connecting anew")
            elif now_s - oldest_s > GIVE_UP_FACTOR * limit_s:
                for stream in owed:
                    if now_s - stream.posted_s > GIVE_UP_FACTOR * limit_s:
                        stream.state.target.give_up()
                        self._post_again(stream)


def _fingerprint(info: PartInfo) -> _Fingerprint:
    return _Fingerprint(info.weight_hash, info.tokenizer_hash, info.vocab_rows)
