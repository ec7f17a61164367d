"""Answers: what goes back for one item, and the columns that the answers of a step make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from outrider.errors import Status
from outrider.features import FeatureBlock, Features
from outrider.logprobs import LogprobBlock, LogprobRows, Logprobs
from outrider.seam import NO_NOTE, Cut, Note, Replies, Timings, VerdictBatch
from target_service.round import NO_F32, NO_U32, Verdict

NO_VERDICT = Verdict(NO_F32, NO_U32, 0)
_NO_STEP = Timings()


class Answer(NamedTuple):
    """One reply item; the echo is that of the token's own round in a plain run."""

    stream_id: int
    generation: int
    committed: int
    cached: int
    verdict: Verdict = NO_VERDICT
    cut: Cut = Cut.NONE
    status: Status = Status.OK
    error: str = ""
    features: FeatureBlock | None = None
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    note: Note = NO_NOTE

    @property
    def echo(self) -> tuple[int, int]:
        """Stream and committed length."""
        return self.stream_id, self.committed


class ReplyTo(Protocol):
    """A link, as seen from the engine thread."""

    def reply(self, batch: VerdictBatch, answered: int) -> None: ...


@dataclass(slots=True)
class _Post:
    answers: list[Answer] = field(default_factory=list)
    finished: int = 0


class Outbox:
    """Answers that wait for the end of the step, by link."""

    def __init__(self) -> None:
        self._posts: dict[ReplyTo, _Post] = {}

    def add(self, link: ReplyTo, answer: Answer) -> None:
        """Answers an item, which may go on (a plain run)."""
        self._posts.setdefault(link, _Post()).answers.append(answer)

    def finish(self, link: ReplyTo) -> None:
        """An item is done with, answered or not: its credit goes back."""
        self._posts.setdefault(link, _Post()).finished += 1

    def flush(self, timings: Timings = _NO_STEP) -> None:
        """Sends one batch per link."""
        posts, self._posts = self._posts, {}
        for link, post in posts.items():
            link.reply(to_batch(post.answers, timings), post.finished)


def to_batch(answers: Sequence[Answer], timings: Timings) -> VerdictBatch:
    """The reply batch of these answers, in order."""
    verdicts = [answer.verdict for answer in answers] or [NO_VERDICT]
    return VerdictBatch(
        replies=Replies(
            stream_ids=np.array([answer.stream_id for answer in answers], np.uint64),
            generations=np.array([answer.generation for answer in answers], np.uint32),
            committed_lengths=np.array([answer.committed for answer in answers], np.uint32),
            statuses=np.array([answer.status for answer in answers], np.uint8),
            cached_lengths=np.array([answer.cached for answer in answers], np.uint32),
            errors={index: answer.error for index, answer in enumerate(answers) if answer.error},
            notes={index: answer.note for index, answer in enumerate(answers) if answer.note is not NO_NOTE},
        ),
        slots_done=np.array([len(answer.verdict.emit) for answer in answers], np.uint8),
        cuts=np.array([answer.cut for answer in answers], np.uint8),
        p=np.concatenate([verdict.p for verdict in verdicts]),
        emit=np.concatenate([verdict.emit for verdict in verdicts]),
        bonus=np.array([answer.verdict.bonus for answer in answers], np.uint32),
        dense_p=np.concatenate([verdict.dense_p for verdict in verdicts]),
        timings=timings,
        features=Features.of(
            [(answer.stream_id, answer.features) for answer in answers if answer.features is not None]
        ),
        logprobs=Logprobs.of(
            [LogprobBlock(*answer.echo, answer.logprobs) for answer in answers if answer.logprobs is not None]
        ),
        prompt_logprobs=Logprobs.of(
            [
                LogprobBlock(*answer.echo, answer.prompt_logprobs)
                for answer in answers
                if answer.prompt_logprobs is not None
            ]
        ),
    )
