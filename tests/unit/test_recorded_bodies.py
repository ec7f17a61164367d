"""Request bodies as widely used clients send them: none is refused, and none holds a field that would be ignored.

`recorded_bodies` has what each client sent to a recorder: openai, LangChain, LiteLLM, guidellm and lm-eval.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.reply import IGNORED_HEADER
from tests.scripted_decoder import EOS, ScriptedDecoder, http_client

BODIES = [
    pytest.param(request["path"], request["body"], id=f"{path.stem}-{index}")
    for path in sorted((Path(__file__).parent / "recorded_bodies").glob("*.json"))
    for index, request in enumerate(json.loads(path.read_text("utf-8"))["requests"])
]


def test_every_client_is_there() -> None:
    """Guards against a folder that is empty, in which case nothing below would run."""
    names = {path.stem for path in (Path(__file__).parent / "recorded_bodies").glob("*.json")}
    assert names == {"openai", "langchain", "litellm", "lm_eval", "guidellm"}
    assert len(BODIES) > 30


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_no_client_s_request_is_refused(path: str, body: dict[str, Any]) -> None:
    """Guards the clients that people have against strict validation."""
    async with http_client(ScriptedDecoder([*b"fine", EOS])) as client:
        response = await client.post(path, json={**body, "model": "stub:script"})
    assert response.status_code == 200, response.text
    assert IGNORED_HEADER not in response.headers
    if body.get("stream"):
        *frames, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert last == "[DONE]"
        assert [frame for frame in frames if "error" in json.loads(frame)] == []
