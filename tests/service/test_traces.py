"""Traces over both links: which spans there are, how they hang together, and that they hold no text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from coordinator.app import build_app
from coordinator.arguments import parse as parse_coordinator
from outrider import tracing
from outrider.errors import InvalidArgument
from outrider.service.config import ServiceConfig
from tests.scripted_decoder import ScriptedDecoder, running_front
from tests.service.stack import draft_service, target_service, until
from tests.service.test_generate import SCRIPT, Doors, open_doors, request

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = CLIENT[:-1] + "0"
SECRET = "nobody's business"
WHERE = "http://collector:4317"


class _Kept(InMemorySpanExporter):
    """Serves several tracers: the first one that closes does not close it."""

    def shutdown(self) -> None:
        pass


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Takes what all parts would send."""
    memory = _Kept()
    monkeypatch.setattr(tracing, "exporter", lambda where: SimpleSpanProcessor(memory))
    monkeypatch.setattr(tracing, "_is_installed", lambda: True)
    return memory


@asynccontextmanager
async def traced_doors(sample_rate: float = 0.0) -> AsyncIterator[Doors]:
    async with (
        target_service(f"stub:script?{SCRIPT}", otlp_endpoint=WHERE) as target,
        draft_service(f"stub:perfect?{SCRIPT}", otlp_endpoint=WHERE) as draft,
        open_doors(target, draft, tracing.tracer("coordinator", WHERE, sample_rate)) as made,
    ):
        yield made


def named(memory: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in memory.get_finished_spans() if span.name == name]


def part(span: ReadableSpan) -> Any:
    return span.resource.attributes["service.name"]


def below(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.span_id == parent.context.span_id


async def test_a_request_of_a_traced_client_is_one_tree(spans: InMemorySpanExporter) -> None:
    """Guards request > round > draft and verify, their counts, the services' part of it, and that no text is in it."""
    async with traced_doors() as made:
        body: dict[str, Any] = {"prompt": SECRET, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        body["speculative"] = {"num_speculative_tokens": 4}
        response = await made.http.post("/v1/completions", json=body, headers={"traceparent": CLIENT})
        assert response.status_code == 200
        await until(lambda: len(named(spans, "stream")) == 2)
    assert {span.context.trace_id for span in spans.get_finished_spans()} == {int(CLIENT[3:35], 16)}
    (asked,) = named(spans, "request")
    assert asked.parent is not None and asked.parent.span_id == int(CLIENT[36:52], 16)
    assert asked.attributes["outrider.completion_tokens"] == 48 and asked.attributes["outrider.status"] == 200
    rounds = named(spans, "round")
    assert all(below(one, asked) for one in rounds)
    assert sum(one.attributes["outrider.tokens"] for one in rounds) == 48
    speculative = [one for one in rounds if one.attributes.get("outrider.gamma") == 4]
    accepted = sum(one.attributes["outrider.accepted"] for one in rounds)
    assert speculative and accepted == asked.attributes["outrider.accepted_draft_tokens"] > 0
    for one in speculative:
        children = [span for span in spans.get_finished_spans() if below(span, one)]
        assert [span.name for span in children] in (["draft", "verify"], ["draft", "plain"])
        assert one.start_time <= children[0].start_time <= children[0].end_time <= children[1].start_time
        assert children[1].end_time <= one.end_time
        assert all("outrider.forward_ms" in span.attributes for span in children if span.name != "plain")
    streams = named(spans, "stream")
    assert {part(span) for span in streams} == {"outrider-draft", "outrider-target"}
    assert all(below(span, asked) and span.attributes["outrider.replies"] > 0 for span in streams)
    written = " ".join(span.to_json() for span in spans.get_finished_spans())
    assert SECRET not in written and json.dumps(response.json()["choices"][0]["text"]) not in written


async def test_the_grpc_door_takes_a_trace_context_too(spans: InMemorySpanExporter) -> None:
    async with traced_doors() as made:
        call = made.stub.Generate(request("hi", max_tokens=4), metadata=(("traceparent", CLIENT),))
        assert [response async for response in call]
    assert named(spans, "request")[0].attributes["outrider.door"] == "grpc"


async def test_who_is_traced(spans: InMemorySpanExporter) -> None:
    """Guards the sampling: a client's word goes before the rate, and nonsense counts as no word."""
    for rate, header, wanted in ((0.0, "", 0), (0.0, "00-nonsense", 0), (1.0, NOT_SAMPLED, 0), (1.0, "", 1)):
        spans.clear()
        async with _client(rate) as client:
            await client.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": header})
        assert len(named(spans, "request")) == wanted, (rate, header)


async def test_a_failure_is_named_and_not_quoted(spans: InMemorySpanExporter) -> None:
    """Guards messages, which may quote what a client sent."""
    async with _client(1.0) as client:
        await client.post("/v1/completions", json={"prompt": "x", "model": SECRET})
    (span,) = named(spans, "request")
    assert span.status.description == "UnknownModel" and span.attributes["outrider.status"] == 404
    assert not span.events and SECRET not in span.to_json()


@asynccontextmanager
async def _client(rate: float) -> AsyncIterator[httpx.AsyncClient]:
    tracer = tracing.tracer("coordinator", WHERE, rate)
    async with running_front(ScriptedDecoder(), tracer=tracer) as front:
        transport = httpx.ASGITransport(build_app(lambda: front))
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            yield client


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a trace that never arrives, or a traceback of an import."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp", None)
    monkeypatch.delenv(tracing.VARIABLE, raising=False)
    assert tracing.endpoint(None) is None
    with pytest.raises(InvalidArgument, match=r"pip install 'outrider\[otel\]'"):
        ServiceConfig(model="stub:markov", port=0, max_slots=8, drain_seconds=1.0, otlp_endpoint=WHERE)
    with pytest.raises(SystemExit):
        parse_coordinator(["--otlp-endpoint", WHERE])
    monkeypatch.setenv(tracing.VARIABLE, WHERE)
    with pytest.raises(InvalidArgument, match="otlp_endpoint"):
        tracing.endpoint(None)


def test_the_settings_reach_the_coordinator(spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.VARIABLE, WHERE)
    made = parse_coordinator(["--trace-sample-rate", "0.5"])
    assert (made.otlp_endpoint, made.trace_sample_rate) == (WHERE, 0.5)


def test_nothing_is_imported_where_nothing_is_traced() -> None:
    """Guards the start of every part, which pays for what it imports: no module takes OpenTelemetry in as a whole."""
    root = Path(__file__).parents[2]
    folders = ("outrider", "coordinator", "draft_service", "target_service", "cluster")
    modules = [path for folder in folders for path in (root / folder).rglob("*.py")]
    assert len(modules) > 200
    taking = re.compile(r"^(from|import) opentelemetry", re.MULTILINE)
    assert not [path.name for path in modules if taking.search(path.read_text())]
