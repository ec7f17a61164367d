"""The trace of one request: request > round > draft, verify or plain; with counts and times, and no text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from coordinator.audit import Line
from outrider import tracing
from outrider.seam import Timings
from outrider.tracing import Tracer

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_LEFT_OUT = ("event", "finish_reasons", "duration_s")
"""Of the audit line: what a span has by itself, and a list that may hold None."""


class RequestTrace:
    """A request that is traced; most are not."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def traceparent(self) -> str:
        """For the services."""
        return tracing.traceparent(self._span)

    def stream(self) -> StreamTrace:
        """The trace of one of its answers."""
        return StreamTrace(self._tracer, self._span)

    def end(self, line: Line) -> None:
        """The request has ended; its line of the log says how."""
        fields = line.fields(time.monotonic())
        tracing.describe(self._span, {name: value for name, value in fields.items() if name not in _LEFT_OUT})
        if line.error is not None:
            tracing.fail(self._span, type(line.error).__name__)
        self._span.end()


class StreamTrace:
    """The rounds of one answer. A plain run is one round, however many tokens it gives."""

    def __init__(self, tracer: Tracer, request: Span) -> None:
        self._tracer = tracer
        self._request = request
        self._round: Span | None = None
        self._call: Span | None = None
        self._name = ""
        self._tokens = self._drafted = self._accepted = 0

    def ask(self, gamma: int) -> None:
        """The draft is asked for so many tokens."""
        self._begin("draft", {"gamma": gamma})
        assert self._round is not None
        tracing.describe(self._round, {"gamma": gamma})

    def proposed(self, slots: int, timings: Timings) -> None:
        """The draft answered."""
        self._end_call({"slots": slots, **_times(timings)})

    def gave_up(self) -> None:
        """The draft did not answer as it should; the round goes on without it."""
        if self._name == "draft":
            self._end_call({}, failed="given up")

    def verify(self, slots: int) -> None:
        """The target is asked about a proposal."""
        self._begin("verify", {"slots": slots})

    def run(self) -> None:
        """The target is asked for plain tokens, or for more of them."""
        if self._name != "plain":
            self._begin("plain", {})

    def sent_again(self) -> None:
        """What was asked of the target is asked again, after a failure."""
        if self._call is not None:
            self._call.add_event("sent again")

    def committed(self, tokens: int, drafted: int, accepted: int) -> None:
        """Tokens became part of the answer."""
        self._tokens += tokens
        self._drafted += drafted
        self._accepted += accepted

    def settled(self, timings: Timings) -> None:
        """The round has ended with what was committed last."""
        self._end_call({} if self._name == "plain" else _times(timings))
        self._end_round()

    def close(self) -> None:
        """The answer has ended; a round that is still open is left unfinished."""
        self._end_call({}, failed="unfinished")
        self._end_round(failed="unfinished")

    def _begin(self, name: str, attributes: dict[str, Any]) -> None:
        self._end_call({})
        if self._round is None:
            self._round = self._tracer.below(self._request, "round", {})
        self._call, self._name = self._tracer.below(self._round, name, attributes, is_call=True), name

    def _end_round(self, failed: str | None = None) -> None:
        if self._round is None:
            return
        counts = {"drafted": self._drafted, "accepted": self._accepted, "tokens": self._tokens}
        tracing.describe(self._round, counts)
        if failed is not None:
            tracing.fail(self._round, failed)
        self._round.end()
        self._round = None
        self._tokens = self._drafted = self._accepted = 0

    def _end_call(self, attributes: dict[str, Any], failed: str | None = None) -> None:
        if self._call is None:
            return
        tracing.describe(self._call, attributes)
        if failed is not None:
            tracing.fail(self._call, failed)
        self._call.end()
        self._call, self._name = None, ""


@contextmanager
def traced(tracer: Tracer | None, line: Line) -> Iterator[RequestTrace | None]:
    """The trace of the request of a log line while the context lasts; None if it is not traced."""
    span = None if tracer is None else tracer.follow("request", line.query.traceparent)
    if tracer is None or span is None:
        yield None
        return
    trace = RequestTrace(tracer, span)
    try:
        yield trace
    except BaseException as error:
        line.error = error
        raise
    finally:
        trace.end(line)


def _times(timings: Timings) -> dict[str, float]:
    """Of the step that the answer rode in, as the service measured them."""
    return {
        "queue_ms": timings.queue_ms,
        "forward_ms": timings.forward_ms,
        "sample_ms": timings.sample_ms,
        "service_ms": timings.total_ms,
    }
