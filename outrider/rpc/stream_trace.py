"""Spans of a service: one for each traced stream, from its opening to its end, with what its steps took in sum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider import tracing
from outrider.seam import StreamOpen, Timings
from outrider.tracing import Tracer

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass(slots=True)
class _Sum:
    span: Span
    replies: int = 0
    queue_ms: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0


class StreamTraces:
    """The traced streams of one link. A span per reply would be one per token of a plain answer."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[int, _Sum] = {}

    def received(self, opens: Iterable[StreamOpen], closed: Iterable[int]) -> None:
        """A message of the coordinator came in."""
        for stream in opens:
            if stream.traceparent and stream.stream_id not in self._open:
                span = self._tracer.follow("stream", stream.traceparent)
                if span is not None:
                    tracing.describe(span, {"prompt_tokens": stream.prompt_length, "rule": stream.rule.name.lower()})
                    self._open[stream.stream_id] = _Sum(span)
        if self._open:
            for stream_id in closed:
                self._end(stream_id)

    def answered(self, batch: Any) -> None:
        """A reply batch leaves."""
        if not self._open:
            return
        timings: Timings = batch.timings
        for stream_id in batch.replies.stream_ids.tolist():
            if (found := self._open.get(stream_id)) is not None:
                found.replies += 1
                found.queue_ms += timings.queue_ms
                found.forward_ms += timings.forward_ms
                found.sample_ms += timings.sample_ms

    def close(self) -> None:
        """The link has ended."""
        for stream_id in list(self._open):
            self._end(stream_id)

    def _end(self, stream_id: int) -> None:
        found = self._open.pop(stream_id, None)
        if found is None:
            return
        sums = {name: getattr(found, name) for name in ("replies", "queue_ms", "forward_ms", "sample_ms")}
        tracing.describe(found.span, sums)
        found.span.end()
