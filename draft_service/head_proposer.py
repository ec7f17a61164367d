"""HeadProposer: a head (EAGLE-3 or MTP) as draft. Slots are drafted as by any other model; what differs is what is fed.

A stream can be drafted while the target's features reach its last committed token but one. They come with the item that
asks, so a committed position is fed with them once, over whatever the head fed itself there while it was drafting. A
stream without them gets no slots; the cached length of its answer tells the coordinator from where on to ask for them.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from draft_service.intake import Message
from draft_service.job import Job
from draft_service.proposer import Proposer
from draft_service.sampler import Sampler
from outrider.engine.feature_store import FeatureStore
from outrider.engine.runner import Step, StepTiming
from outrider.engine.sequence import Sequence
from outrider.engine.streams import Streams
from outrider.rpc.link import Delivery

logger = logging.getLogger(__name__)


class HeadProposer(Proposer):
    """The worker of a draft service with a head. Used in the engine thread only.

    In a sequence, `cached` counts the tokens that were fed: the row of position t is fed token t + 1, so rows
    [0, cached - 1) have been computed, those with features only once the item is answered.

    Args:
        streams: with as many blocks as the head has seats, each as long as a stream can be.
        sampler: draws the slots.
        features: of the streams; the head reads it too.
        limits: see `Proposer`.
    """

    def __init__(self, streams: Streams, sampler: Sampler, features: FeatureStore, **limits: Any) -> None:
        super().__init__(streams, sampler, **limits)
        self._features = features

    def receive(self, message: Message) -> None:
        super().receive(message)
        if not isinstance(message, Delivery) or not self._streams.is_current(message.owner, message.epoch):
            return
        for stream_id in message.batch.closed.tolist():
            if stream_id not in self._streams:
                self._features.forget(stream_id)
        for stream_id, block in message.batch.features.blocks():
            sequence = self._streams.get(stream_id)
            if sequence is None or sequence.owner != message.owner:
                continue
            if not self._features.put(stream_id, block):
                logger.warning("stream %016x: unusable features of %d bytes a row", stream_id, block.rows.shape[1])

    def finish(self, step: Step[list[Job]], logits: Tensor, timing: StepTiming) -> None:
        for job, span in zip(step.payload, step.spans, strict=True):
            known = self._features.get(job.stream_id)
            if known is not None:
                self._features.used(known, min(span.start - 1 + len(span.tokens), job.committed - 1))
        super().finish(step, logits, timing)

    def _is_readable(self, job: Job, sequence: Sequence) -> bool:
        return super()._is_readable(job, sequence) and (bool(job.slots) or self._has_features(job, sequence))

    def _has_features(self, job: Job, sequence: Sequence) -> bool:
        """Whether a job's committed tokens can be fed; places the sequence where their feeding begins."""
        known = self._features.get(job.stream_id)
        if known is not None and not sequence.cached and known.fed > known.origin:
            # Its keys and values went to another stream; the target still has the rows that they were made of.
            self._features.forget(job.stream_id)
            known = None
        if known is None or not known.first <= job.committed - 2 < known.end:
            return False
        # What an item that was dropped had drafted was fed without features.
        sequence.cached = min(sequence.cached, known.fed + 1, job.committed)
        if sequence.cached <= known.first:
            known.origin = known.fed = known.first
            sequence.cached = known.first + 1
        return True

    def _finish(self, job: Job) -> None:
        sequence, known = self.intake.sequence(job), self._features.get(job.stream_id)
        sequence.cached = min(sequence.cached, known.fed + 1 if known is not None else 0)
        super()._finish(job)
        if len(self._features) > 2 * len(self._streams) + 64:
            for stream_id in [stream_id for stream_id in self._features if stream_id not in self._streams]:
                self._features.forget(stream_id)
