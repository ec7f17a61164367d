"""Prompt lookup: the text itself as draft.

The last n tokens are looked up earlier in prompt and text; what followed there is proposed. Longest n first, most
recent match first. The q of such a draft is one-hot: exact, and nothing but ids travels. No model, no tokenizer, no
torch.
(Saxena, "Prompt Lookup Decoding", 2023; the flags are vLLM's.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from draft_service.intake import Intake, Message
from draft_service.job import Job, Slot
from outrider.engine.streams import Streams
from outrider.sampling import Form, Rule


@dataclass(slots=True)
class NgramIndex:
    """Where each n-gram of a token list was last continued; grows with the list, each lookup takes constant time.

    Attributes:
        shortest, longest: n, inclusive.
        tokens: everything indexed so far.
    """

    shortest: int
    longest: int
    tokens: list[int] = field(default_factory=list)
    # n-gram -> position of the token behind its latest occurrence. An n-gram enters when that token is known, so the
    # end of the list never finds itself.
    _continued_at: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, tokens: list[int]) -> None:
        """Indexes further tokens."""
        known, grams = self.tokens, self._continued_at
        for token in tokens:
            end = len(known)
            for n in range(self.shortest, min(self.longest, end) + 1):
                grams[tuple(known[end - n :])] = end
            known.append(token)

    def propose(self, slots: int) -> list[int]:
        """Up to `slots` tokens that followed the longest known suffix; [] where there is none.

        A continuation that reaches the end of the list goes on into itself, so that a text that repeats with a period
        shorter than `slots` is continued for all of them.
        """
        known = self.tokens
        for n in range(min(self.longest, len(known)), self.shortest - 1, -1):
            start = self._continued_at.get(tuple(known[-n:]))
            if start is not None:
                drafted = known[start : start + slots]
                while len(drafted) < slots:
                    drafted.append(drafted[start + len(drafted) - len(known)])
                return drafted
        return []


@dataclass(slots=True)
class _Lookup:
    """A stream's index and what it was built from."""

    index: NgramIndex
    hash: int = 0


class NgramProposer:
    """Answers every message at once. One thread calls it.

    Streams that want the dense form get no slots: it ships rows over the target's vocabulary, which is not known here.
    """

    def __init__(
        self, streams: Streams, *, shortest: int, longest: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            streams: kept without KV.
            shortest: prompt_lookup_min.
            longest: prompt_lookup_max.
            clock: monotonic, in seconds.
        """
        self.intake = Intake(streams, clock)
        self._clock = clock
        self._shortest = shortest
        self._longest = longest
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

    def _index(self, job: Job) -> NgramIndex:
        """The stream's index over its committed tokens; built anew if they are not a continuation of what it holds."""
        sequence = self.intake.sequence(job)
        lookup = self._lookups.get(job.stream_id)
        size = len(lookup.index.tokens) if lookup else 0
        if lookup is None or size > len(sequence.tokens) or sequence.hash_at(size) != lookup.hash:
            lookup = _Lookup(NgramIndex(self._shortest, self._longest))
            self._lookups[job.stream_id] = lookup
            size = 0
        lookup.index.extend(sequence.tokens[size:])
        lookup.hash = sequence.hash_at(len(sequence.tokens))
        return lookup.index

    def _sweep(self) -> None:
        streams = self.intake.streams
        if len(self._lookups) > len(streams):
            self._lookups = {key: lookup for key, lookup in self._lookups.items() if key in streams}
