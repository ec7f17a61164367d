"""The text itself as draft: what followed the same words earlier in a stream's own prompt and text is proposed.

How it is found is an index's matter (`ngram`, `suffix`). The q of such a draft is one-hot: exact, and nothing but ids
travels. No model, no tokenizer, no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from draft_service.intake import Intake, Message
from draft_service.job import Job, Slot
from outrider.engine.streams import Streams
from outrider.sampling import Form, Rule


class Index(Protocol):
    """Finds continuations in the tokens of one stream."""

    @property
    def size(self) -> int:
        """Tokens taken in so far."""

    def extend(self, tokens: list[int]) -> None:
        """Takes further tokens in."""

    def propose(self, slots: int) -> list[int]:
        """At most `slots` tokens to go on with; [] where nothing is found."""


@dataclass(slots=True)
class _Lookup:
    """A stream's index and what it was built from."""

    index: Index
    hash: int = 0


class LookupProposer:
    """Answers every message at once. One thread calls it.

    Streams that want the dense form get no slots: it ships rows over the target's vocabulary, which is not known here.
    """

    def __init__(
        self, streams: Streams, new_index: Callable[[], Index], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            streams: kept without KV.
            new_index: makes the empty index of a stream; streams share nothing.
            clock: monotonic, in seconds.
        """
        self.intake = Intake(streams, clock)
        self._clock = clock
        self._new_index = new_index
        self._lookups: dict[int, _Lookup] = {}

    def receive(self, message: Message) -> None:
        """Takes in a message and answers its items."""
        self.intake.expire()
        self.intake.receive(message)
        for job in list(self.intake.jobs.values()):
            self._draft(job)
            self.intake.finish(job)
        self.intake.flush()
        self._sweep()

    def tick(self) -> None:
        """Frees what leases and deadlines have ended; to be called now and then."""
        self.intake.expire()
        self._sweep()

    def _draft(self, job: Job) -> None:
        job.started_s = self._clock()
        index = self._index(job)
        dense = job.opened.form is Form.DENSE and job.opened.rule is Rule.STANDARD and not job.opened.params.greedy
        if job.wanted and not dense:
            excluded = self.intake.excluded[job.owner]
            stops = job.opened.params.stop_token_ids
            for token in index.propose(job.wanted):
                if token in excluded:
                    break
                job.slots.append(Slot(token))
                if token in stops:
                    break
        job.step_streams, job.step_tokens = 1, len(job.slots)
        job.sample_ms = (self._clock() - job.started_s) * 1_000

    def _index(self, job: Job) -> Index:
        """The stream's index over its committed tokens; built anew if they are not a continuation of what it holds."""
        sequence = self.intake.sequence(job)
        lookup = self._lookups.get(job.stream_id)
        size = lookup.index.size if lookup else 0
        if lookup is None or size > len(sequence.tokens) or sequence.hash_at(size) != lookup.hash:
            lookup = _Lookup(self._new_index())
            self._lookups[job.stream_id] = lookup
            size = 0
        lookup.index.extend(sequence.tokens[size:])
        lookup.hash = sequence.hash_at(len(sequence.tokens))
        return lookup.index

    def _sweep(self) -> None:
        streams = self.intake.streams
        if len(self._lookups) > len(streams):
            self._lookups = {key: lookup for key, lookup in self._lookups.items() if key in streams}
