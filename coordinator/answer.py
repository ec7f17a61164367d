"""One request's answers as they are decoded: emissions in, pieces of text with their counts out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from coordinator.backend import BackendStream
from coordinator.metrics import Metrics
from coordinator.prepare import Prepared
from coordinator.prompts import Echo
from coordinator.request import Emission, StreamStats
from coordinator.text import AnswerText
from outrider.errors import OutriderError
from outrider.logprobs import LogprobRows


class Piece(NamedTuple):
    """What one emission adds to one of the answers.

    Attributes:
        choice: index of the answer.
        text: became certain; may be empty while a stop string or a character is incomplete.
        token_ids, drafted, text_ends: parallel; whether the draft proposed the token, and the characters of `text`
            that are certain after it.
        finish_reason: "stop" or "length" with the last piece.
        stop_reason: the stop string or the stop id that ended the answer; None for an end-of-sequence id.
        text_starts: parallel to the ids; where in the whole answer the text of each begins.
        logprobs: parallel to the ids, where they were asked for.
        prompt_logprobs: of the prompt's tokens from the second on, with the first piece, where they were asked for.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    text_ends: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    text_starts: tuple[int, ...] = ()
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None


class Usage(NamedTuple):
    """Tokens of a request: each prompt's once; generated ones over all answers, stop ids included.

    Attributes:
        cached_tokens: of the prompts, those that the target did not have to compute for the first answer to each.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Answer:
    """All answers to one query; an async iterator of their pieces in the order in which they come.

    `aclose` ends the streams that are still decoding; whoever creates an answer must call it.
    """

    def __init__(
        self, prepared: Prepared, streams: Sequence[BackendStream], metrics: Metrics, arrived_s: float
    ) -> None:
        """`arrived_s` is `time.monotonic()` at the request's arrival; `streams` are those of `prepared.requests`."""
        self.completion_tokens = 0
        self._prepared = prepared
        self._parts = [
            _Part(index, stream, text, prepared, metrics, arrived_s)
            for index, (stream, text) in enumerate(zip(streams, prepared.texts, strict=True))
        ]
        self._metrics = metrics

    @property
    def usage(self) -> Usage:
        """So far."""
        cached = sum(part.stats.cached_tokens for part in self._parts[:: self._prepared.n])
        return Usage(sum(map(len, self._prepared.prompts)), self.completion_tokens, cached)

    def prompt_ids(self, choice: int) -> tuple[int, ...]:
        """Of the prompt that a choice answers."""
        return self._prepared.prompts[choice // self._prepared.n]

    def echo(self, choice: int) -> Echo | None:
        """The prompt as a choice repeats it, if it does."""
        echoes = self._prepared.echoes
        return echoes[choice // self._prepared.n] if echoes else None

    @property
    def outcomes(self) -> list[str | None]:
        """How each answer ended: "stop", "length", "error" or "abort"; None while it is being decoded."""
        return [part.outcome for part in self._parts]

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to the first token of any answer; None before it."""
        return min((part.first_s for part in self._parts if part.first_s is not None), default=None)

    @property
    def speculation(self) -> StreamStats:
        """What speculation did so far, over all answers."""
        return _total([part.stats for part in self._parts])

    async def __aiter__(self) -> AsyncIterator[Piece]:
        self._metrics.prompt_tokens.inc(self.usage.prompt_tokens)
        async for piece in self._parts[0].pieces() if len(self._parts) == 1 else self._merged():
            self.completion_tokens += len(piece.token_ids)
            yield piece

    async def aclose(self) -> None:
        """End what is still decoding and free it on both sides."""
        for part in self._parts:
            await part.aclose()

    async def _merged(self) -> AsyncIterator[Piece]:
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.ensure_future(part.run(queue)) for part in self._parts]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Part:
    """One of the answers."""

    def __init__(
        self,
        index: int,
        stream: BackendStream,
        text: AnswerText,
        prepared: Prepared,
        metrics: Metrics,
        arrived_s: float,
    ) -> None:
        self._index = index
        self._eos_ids = prepared.eos_ids
        self._prompt_only = prepared.prompt_only
        self._stream = stream
        self._text = text
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._last_s: float | None = None
        self.first_s: float | None = None
        self.outcome: str | None = None

    @property
    def stats(self) -> StreamStats:
        return self._stream.stats

    async def pieces(self) -> AsyncIterator[Piece]:
        try:
            async for emission in self._stream:
                yield self._piece(emission)
        except OutriderError:
            self._end("error")
            raise

    async def run(self, queue: asyncio.Queue[Piece | BaseException | None]) -> None:
        try:
            async for piece in self.pieces():
                queue.put_nowait(piece)
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    async def aclose(self) -> None:
        self._end("abort")
        await self._stream.aclose()

    def _piece(self, emission: Emission) -> Piece:
        if self._prompt_only:
            emission = Emission((), (), "length", None, None, emission.prompt_logprobs)
        self._observe(len(emission.tokens))
        ended = emission.finish_reason is not None
        text, ends, starts = self._text.take(emission.tokens, last=ended)
        if emission.finish_reason is not None:
            self._end(emission.finish_reason)
        stop_reason: str | int | None = self._text.stop_reason
        if emission.stop_token not in self._eos_ids:
            stop_reason = stop_reason or emission.stop_token
        return Piece(
            self._index,
            text,
            emission.tokens,
            emission.drafted,
            ends,
            emission.finish_reason,
            stop_reason,
            starts,
            emission.logprobs,
            emission.prompt_logprobs,
        )

    def _observe(self, tokens: int) -> None:
        now = time.monotonic()
        metrics = self._metrics
        metrics.generation_tokens.inc(tokens)
        if self._last_s is None:
            self.first_s = now - self._arrived_s
            metrics.ttft.observe(self.first_s)
        else:
            for _ in range(tokens):
                metrics.itl.observe((now - self._last_s) / tokens)
        self._last_s = now

    def _end(self, outcome: str) -> None:
        """Counts the answer's end, once."""
        if self.outcome is None:
            self.outcome = outcome
            self._metrics.requests.labels(outcome).inc()
            self._metrics.e2e.observe(time.monotonic() - self._arrived_s)


def _total(parts: Sequence[StreamStats]) -> StreamStats:
    length = max(len(part.acceptance_histogram) for part in parts)
    histogram = [0] * length
    for part in parts:
        for accepted, rounds in enumerate(part.acceptance_histogram):
            histogram[accepted] += rounds
    return StreamStats(
        rule=parts[0].rule,
        synthetic=parts[0].synthetic,
        rounds=sum(part.rounds for part in parts),
        num_spec_steps=sum(part.num_spec_steps for part in parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_tested_tokens=sum(part.num_tested_tokens for part in parts),
        num_accepted_draft_tokens=sum(part.num_accepted_draft_tokens for part in parts),
        acceptance_histogram=histogram,
    )
