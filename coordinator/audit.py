"""One line of the log per request: who asked, how much was computed, how it ended, how long it took; never any text."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from coordinator.answer import Answer
from coordinator.problems import problem
from coordinator.query import Query
from outrider.log_format import FIELDS

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Line:
    """What is known of a request so far.

    Attributes:
        arrived_s, begun_s: `time.monotonic()` at its arrival, and when it had a place; None while it waits.
        answer: from then on.
        error: what ended it, or None.
    """

    query: Query
    arrived_s: float
    begun_s: float | None = None
    answer: Answer | None = None
    error: BaseException | None = None

    def begun(self, answer: Answer) -> None:
        """It has a place and is being decoded."""
        self.begun_s, self.answer = time.monotonic(), answer

    def fields(self, ended_s: float) -> dict[str, Any]:
        """For JSON: times in seconds, tokens over all answers."""
        query, answer = self.query, self.answer
        found: dict[str, Any] = {
            "event": "request",
            "request_id": query.request_id,
            "door": "http" if query.request_id else "grpc",
            "key": query.client,
            "answers": len(query.prompts) * query.n,
            "status": 200 if self.error is None else _status(self.error),
            "duration_s": round(ended_s - self.arrived_s, 6),
        }
        if answer is None or self.begun_s is None:
            return found
        usage, stats = answer.usage, answer.speculation
        first_s = answer.first_token_s
        return found | {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "rule": stats.rule.name.lower(),
            "draft_tokens": stats.num_draft_tokens,
            "accepted_draft_tokens": stats.num_accepted_draft_tokens,
            "finish_reasons": answer.outcomes,
            "waited_s": round(self.begun_s - self.arrived_s, 6),
            "first_token_s": None if first_s is None else round(first_s, 6),
        }


@contextmanager
def audited(query: Query, arrived_s: float) -> Iterator[Line]:
    """Writes the line when the context ends, however it does. Requests that are no query yet have none."""
    line = Line(query, arrived_s)
    try:
        yield line
    except BaseException as error:
        line.error = error
        raise
    finally:
        _write(line)


def _write(line: Line) -> None:
    now_s = time.monotonic()
    name, elapsed_s = line.query.request_id or "(gRPC)", now_s - line.arrived_s
    extra = {FIELDS: line.fields(now_s)}
    if line.answer is None:
        logger.info("request %s: not answered, %s", name, type(line.error).__name__, extra=extra)
        return
    usage = line.answer.usage
    counts = (usage.prompt_tokens, usage.completion_tokens, elapsed_s)
    logger.info("request %s: %d prompt and %d generated tokens in %.3f s", name, *counts, extra=extra)


def _status(error: BaseException) -> int:
    """HTTP's; 499 (of nginx) for a client that went away."""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return 499
    return problem(error).status if isinstance(error, Exception) else 500
