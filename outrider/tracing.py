"""OpenTelemetry traces, where an endpoint is set. Without one nothing of OpenTelemetry is imported or timed.

Spans hold counts and times, never a text, an id of a token or a probability. Whether a request is traced is decided
once, where it enters: by the client's `traceparent` if it sent one, else by chance.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider import __version__
from outrider.errors import InvalidArgument

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACEPARENT = "traceparent"
PREFIX = "outrider"
_FAREWELL_S = 3.0
_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc"


def endpoint(given: str | None) -> str | None:
    """Where traces go: the setting, or the variable that programs with OpenTelemetry share; None for nowhere.

    Raises:
        InvalidArgument: what sends them is not installed.
    """
    where = given or os.environ.get(VARIABLE) or None
    if where is not None and not _is_installed():
        raise InvalidArgument(
            "otlp_endpoint", f"{where} is to get traces, which needs OpenTelemetry: pip install 'outrider[otel]'"
        )
    return where


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:
        return False


def exporter(where: str) -> SpanProcessor:
    """Sends spans to a collector by OTLP over gRPC, from a thread of its own; more than it can send are dropped."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter(endpoint=where))


class Tracer:
    """Begins the spans of one process. Made once; not OpenTelemetry's global one, which belongs to the host program."""

    def __init__(self, part: str, processor: SpanProcessor, sample_rate: float = 0.0) -> None:
        """
        Args:
            part: of Outrider, which is the service's name in traces.
            processor: takes what has ended.
            sample_rate: share of the requests without a `traceparent` that are traced.
        """
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        resource = Resource.create({"service.name": f"{PREFIX}-{part}", "service.version": __version__})
        sampler = ParentBased(TraceIdRatioBased(sample_rate))
        self._provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(PREFIX, __version__)

    def follow(self, name: str, traceparent: str, *, is_server: bool = True) -> Span | None:
        """A span below somebody else's, or the first one of a trace; None if it is not to be recorded."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # An empty context, not the current one: whatever else in this process is traced is no parent of ours.
        above = TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}, Context())
        kind = SpanKind.SERVER if is_server else SpanKind.INTERNAL
        span = self._tracer.start_span(name, above, kind)
        return span if span.is_recording() else None

    def below(self, parent: Span, name: str, attributes: Mapping[str, Any], *, is_call: bool = False) -> Span:
        """A span below one of this process; `is_call` for what another process does meanwhile."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        kind = SpanKind.CLIENT if is_call else SpanKind.INTERNAL
        span = self._tracer.start_span(name, set_span_in_context(parent, Context()), kind)
        describe(span, attributes)
        return span

    def close(self) -> None:
        """Sends what is left, for a few seconds at most: a collector that is away must not hold up a shutdown."""
        sending = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        sending.start()
        sending.join(_FAREWELL_S)


def tracer(part: str, where: str | None, sample_rate: float = 0.0) -> Tracer | None:
    """The tracer of a part; None where traces go nowhere."""
    if where is None:
        return None
    logger.info("traces go to %s", where)
    return Tracer(part, exporter(where), sample_rate)


def traceparent(span: Span) -> str:
    """A span as the header's value."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def describe(span: Span, attributes: Mapping[str, Any]) -> None:
    """Adds attributes, under Outrider's prefix and without those that are None."""
    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(f"{PREFIX}.{name}", value)


def fail(span: Span, reason: str) -> None:
    """Marks a span as failed; the reason is a word of ours, never a message, which may quote a request."""
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, reason))
