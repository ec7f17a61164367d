"""JSON logs, and their line per request: counts, times and reasons, and no text of anybody's."""

from __future__ import annotations

import asyncio
import json
import logging
from hashlib import sha256
from typing import Any

import pytest

from coordinator.api_keys import ApiKey, ApiKeys
from coordinator.front import FrontConfig
from outrider.errors import DeadlineExceeded, InvalidArgument
from outrider.log_format import JsonLines
from outrider.service.config import ServiceConfig
from tests.scripted_decoder import MODEL, ScriptedDecoder, http_client

SECRET = "the client's own words"
BODY = {"model": MODEL, "prompt": SECRET, "max_tokens": 4}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The audit lines, as they would be written."""
    written = [JsonLines("coordinator").format(record) for record in caplog.records]
    return [line for line in map(json.loads, written) if line.get("event") == "request"]


async def test_an_answered_request_is_one_line_without_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with http_client(ScriptedDecoder(round_size=3)) as client:
            response = await client.post(
                "/v1/completions", json={**BODY, "n": 2}, headers={"x-request-id": "request-7"}
            )
    assert response.status_code == 200
    (line,) = lines(caplog)
    assert line["request_id"] == "request-7" and line["door"] == "http" and line["status"] == 200
    assert line["answers"] == 2 and line["finish_reasons"] == ["length", "length"]
    assert line["prompt_tokens"] == 1 + len(SECRET) and line["completion_tokens"] == 8
    assert line["rule"] in ("standard", "coupled")
    assert 0 <= line["waited_s"] <= line["first_token_s"] <= line["duration_s"]
    written = " ".join(JsonLines("x").format(record) for record in caplog.records)
    assert SECRET not in written and response.json()["choices"][0]["text"] not in written


async def test_requests_that_are_not_answered_have_a_line_with_their_status(caplog: pytest.LogCaptureFixture) -> None:
    decoder = ScriptedDecoder()
    with caplog.at_level(logging.INFO):
        async with http_client(decoder) as client:
            await client.post("/v1/completions", json={**BODY, "model": "another"})
            decoder.error, decoder.error_after = DeadlineExceeded("too late"), 2
            await client.post("/v1/completions", json=BODY)
    refused, failed = lines(caplog)
    assert refused["status"] == 404 and "finish_reasons" not in refused
    assert failed["status"] == 504 and failed["finish_reasons"] == ["error"]


async def test_a_client_that_goes_away_is_named_as_such(caplog: pytest.LogCaptureFixture) -> None:
    decoder = ScriptedDecoder()
    decoder.gate = asyncio.Event()
    with caplog.at_level(logging.INFO):
        async with http_client(decoder) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.post("/v1/completions", json=BODY), 0.2)
    (line,) = lines(caplog)
    assert line["status"] == 499 and line["finish_reasons"] == ["abort"]


async def test_the_key_is_named_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    key = "a-key-that-nobody-must-see-in-a-log"
    config = FrontConfig(api_keys=ApiKeys(fixed=(ApiKey("research", sha256(key.encode()).digest()),)))
    with caplog.at_level(logging.INFO):
        async with http_client(ScriptedDecoder(), config) as client:
            await client.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {key}"})
    (line,) = lines(caplog)
    assert line["key"] == "research"
    assert key not in json.dumps(lines(caplog))


def test_a_line_is_one_json_object_whatever_is_in_it() -> None:
    record = logging.LogRecord("name", logging.ERROR, "", 0, 'two\nlines and a "quote" of %s', ("ü",), None)
    record.created, record.msecs = 0.25, 250.0
    try:
        raise ValueError("x\ny")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    written = JsonLines("draft").format(record)
    line = json.loads(written)
    assert "\n" not in written and "ValueError: x\ny" in line.pop("trace")
    assert line == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "ERROR",
        "logger": "name",
        "part": "draft",
        "message": 'two\nlines and a "quote" of ü',
    }


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="log_format"):
        ServiceConfig(model="stub:markov", port=0, max_slots=1, drain_seconds=1, log_format="xml")
