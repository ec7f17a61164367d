"""Intake: what every proposer does with messages; keeps the streams, turns items into jobs, and sends answers.

An item is answered exactly once, unless a newer item of its stream or the end of its link makes the answer pointless.
A proposer that cannot draft answers OK with fewer slots, down to none: a draft is never an error to a client.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from draft_service.job import Answer, Job, to_batch
from outrider.engine.sequence import Sequence
from outrider.engine.streams import Streams
from outrider.errors import OutriderError, StaleCache, Status
from outrider.rpc.columns import offsets
from outrider.rpc.link import Attached, Delivery, Detached
from outrider.seam import U32, ProposalBatch, ProposeBatch, Timings

logger = logging.getLogger(__name__)

Message = Attached | Detached | Delivery[ProposeBatch, ProposalBatch]
Clock = Callable[[], float]


class ReplyTo(Protocol):
    """A link, as seen from the engine thread."""

    def reply(self, batch: ProposalBatch, answered: int) -> None: ...


_NO_TIMINGS = Timings()
_NO_KEY = (-1, -1)

Send = Callable[[ReplyTo, ProposalBatch, int], None]


def send_as_is(link: ReplyTo, batch: ProposalBatch, answered: int) -> None:
    link.reply(batch, answered)


@dataclass(slots=True)
class _Post:
    """Answers of one link that wait for the next `flush`."""

    answers: list[Answer] = field(default_factory=list)
    answered: int = 0
    timings: Timings = _NO_TIMINGS


class Intake:
    """The streams and outstanding items of a draft service. Used in the engine thread only.

    Args:
        streams: of the service.
        clock: monotonic, in seconds.
        send: brings a batch and the number of items that it answers to a link.

    Attributes:
        jobs: outstanding items by stream, oldest first.
        excluded: ids that a coordinator's q must never hold, by coordinator.
    """

    def __init__(self, streams: Streams, clock: Clock = time.monotonic, send: Send = send_as_is) -> None:
        self.streams = streams
        self.jobs: dict[int, Job] = {}
        self.excluded: dict[bytes, U32] = {}
        self._clock = clock
        self._send = send
        self._posts: dict[ReplyTo, _Post] = {}
        # Generation and committed length of each stream's latest item.
        self._newest: dict[int, tuple[int, int]] = {}

    def receive(self, message: Message) -> None:
        """Takes in a message of a link. `flush` sends what it was answered."""
        if isinstance(message, Attached):
            self.streams.attach(message.owner, message.epoch)
            self._forget(message.owner)
            self.excluded[message.owner] = message.excluded_ids
        elif isinstance(message, Detached):
            if self.streams.is_current(message.owner, message.epoch):
                self._forget(message.owner)
                self.excluded.pop(message.owner, None)
            self.streams.detach(message.owner, message.epoch)
        elif self.streams.is_current(message.owner, message.epoch):
            self._deliver(message)

    def expire(self) -> None:
        """Ends streams whose lease or deadline has run out, with their jobs."""
        for stream_id in self.streams.expire():
            self._newest.pop(stream_id, None)
            job = self.jobs.pop(stream_id, None)
            if job is not None:
                self._post(job, Answer(stream_id, job.generation, job.committed, 0, (), Status.NOT_FOUND, "expired"))

    def sequence(self, job: Job) -> Sequence:
        """The sequence of an outstanding job."""
        sequence = self.streams.get(job.stream_id)
        assert sequence is not None, "a job lives no longer than its stream"
        return sequence

    def finish(self, job: Job) -> None:
        """Answers a job with the slots it has."""
        del self.jobs[job.stream_id]
        sequence = self.sequence(job)
        answer = Answer(
            job.stream_id, job.generation, job.committed, sequence.cached, job.slots, note=sequence.take_note()
        )
        self._post(job, answer)

    def fail(self, job: Job, error: str) -> None:
        """Answers a job whose step failed; its KV is not to be trusted."""
        del self.jobs[job.stream_id]
        self.streams.kv.drop_cache(self.sequence(job))
        self._post(job, Answer(job.stream_id, job.generation, job.committed, 0, (), Status.INTERNAL, error))

    def refuse(self, job: Job, reason: str) -> None:
        """Answers a job that there is no room for; the stream stays."""
        del self.jobs[job.stream_id]
        cached = self.sequence(job).cached
        answer = Answer(job.stream_id, job.generation, job.committed, cached, (), Status.RESOURCE_EXHAUSTED, reason)
        self._post(job, answer)

    def flush(self) -> None:
        """Sends the answers since the last flush, one batch per link."""
        posts, self._posts = self._posts, {}
        for link, post in posts.items():
            self._send(link, to_batch(post.answers, post.timings), post.answered)

    def _deliver(self, delivery: Delivery[ProposeBatch, ProposalBatch]) -> None:
        batch = delivery.batch
        for stream_id in batch.closed.tolist():
            if self.streams.close(stream_id, delivery.owner):
                self._newest.pop(stream_id, None)
                self._supersede(stream_id)
        failed: dict[int, OutriderError] = {}
        for opened in batch.opens:
            try:
                self.streams.open(opened, delivery.owner)
                self._newest.pop(opened.stream_id, None)
            except OutriderError as error:
                failed[opened.stream_id] = error
        items = batch.items
        starts = offsets(items.token_counts)
        rows = zip(
            items.stream_ids.tolist(),
            items.generations.tolist(),
            items.committed_lengths.tolist(),
            items.bases.tolist(),
            items.prefix_hashes.tolist(),
            batch.slots.tolist(),
            batch.deadlines_ms.tolist(),
            batch.least_survivals.tolist(),
            strict=True,
        )
        for index, (stream_id, generation, committed, base, base_hash, wanted, deadline_ms, least) in enumerate(rows):
            if index in delivery.refused:
                continue
            key = (generation, committed)
            held = self.streams.get(stream_id)
            if held is not None and held.owner == delivery.owner and key <= self._newest.get(stream_id, _NO_KEY):
                # Seen before: it has one answer, and must not cut what a newer item brought.
                self._posts.setdefault(delivery.link, _Post()).answered += 1
                continue
            try:
                if stream_id in failed:
                    raise failed[stream_id]
                sequence = self.streams.sync(
                    stream_id,
                    delivery.owner,
                    generation,
                    base=base,
                    tokens=items.tokens[starts[index] : starts[index + 1]].tolist(),
                    committed=committed,
                    base_hash=base_hash,
                )
            except OutriderError as error:
                cached = error.cached_length if isinstance(error, StaleCache) else 0
                self._add(
                    delivery.link,
                    Answer(stream_id, generation, committed, cached, (), error.status, str(error)),
                    _NO_TIMINGS,
                )
                continue
            if sequence is None:  # an older generation, for which nobody waits any more
                self._posts.setdefault(delivery.link, _Post()).answered += 1
                continue
            self._newest[stream_id] = key
            self._supersede(stream_id)
            self.jobs[stream_id] = Job(
                opened=sequence.opened,
                generation=generation,
                committed=committed,
                wanted=wanted,
                link=delivery.link,
                owner=delivery.owner,
                arrived_s=delivery.arrived_s,
                least_survival=least / 65_535,
                deadline_s=delivery.arrived_s + deadline_ms / 1_000 if deadline_ms else math.inf,
            )

    def _supersede(self, stream_id: int) -> None:
        """Drops a stream's outstanding job without an answer; its credit goes back."""
        job = self.jobs.pop(stream_id, None)
        if job is not None:
            self._posts.setdefault(job.link, _Post()).answered += 1

    def _forget(self, owner: bytes) -> None:
        """Drops a coordinator's jobs: the link that waits for them has ended."""
        for job in [job for job in self.jobs.values() if job.owner == owner]:
            del self.jobs[job.stream_id]

    def _post(self, job: Job, answer: Answer) -> None:
        self._add(job.link, answer, job.timings(self._clock()))

    def _add(self, link: ReplyTo, answer: Answer, timings: Timings) -> None:
        post = self._posts.setdefault(link, _Post())
        post.answers.append(answer)
        post.answered += 1
        # The timings of a batch are those of the job that took longest.
        if timings.total_ms >= post.timings.total_ms:
            post.timings = timings


def known_ids(excluded: U32, vocab_rows: int) -> U32:
    """The excluded ids that a vocabulary of `vocab_rows` rows has at all."""
    return np.unique(excluded[excluded < vocab_rows])
