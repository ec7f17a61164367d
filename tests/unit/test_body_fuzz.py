"""Bodies of all kinds: an answer or a reason, never a defect, and nothing that stays behind."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.app import build_app
from coordinator.fields import FIELDS
from tests.scripted_decoder import MODEL, running_front
from tests.unit.pure_pair import PurePair

EXAMPLES = 40
DOORS = {
    "completions": {"model": MODEL, "prompt": "hi", "max_tokens": 3},
    "chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
}
EDGES = [-1, 0, 1, 2, 255, 258, 2**31, 2**32, 2**53 + 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**400]
TEXTS = ["", " ", "a", "\x00", "\ud83d", "e\u0301", "\U0001f600" * 3, "<|endoftext|>", "1", "1e3", "true", "x" * 3_000]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(EDGES),
    st.integers(-3, 300),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(TEXTS),
    st.text(max_size=5),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(TEXTS) | st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([*FIELDS, "model", "prompt", "messages", "no_such_field"])
changes = st.dictionaries(names, values, max_size=3)
bodies = st.one_of(
    st.tuples(st.sampled_from(sorted(DOORS)), changes).map(lambda t: (t[0], json.dumps({**DOORS[t[0]], **t[1]}))),
    st.tuples(st.sampled_from(sorted(DOORS)), values.map(json.dumps)),
    st.tuples(st.sampled_from(sorted(DOORS)), st.binary(max_size=60).map(lambda b: b.decode("latin-1"))),
)


async def ask(door: str, text: str) -> httpx.Response:
    """The answer of a pair of its own; afterwards nothing of the request is left at the door."""
    pair = PurePair()
    pair._info = replace(pair._info, max_model_len=128)  # answers that fill the context stay short
    async with running_front(pair) as front:  # type: ignore[arg-type]
        transport = httpx.ASGITransport(build_app(lambda: front))
        async with asyncio.timeout(20), httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            answer = await client.post(f"/v1/{door}", content=text.encode("latin-1"))
            assert front._admission is not None
            assert (front._admission.running, front._admission.waiting, front._preparing.running) == (0, 0, 0)
            assert (await client.post("/v1/completions", json=DOORS["completions"])).status_code == 200
    return answer


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies)
def test_no_body_is_answered_with_a_defect(body: tuple[str, str]) -> None:
    """Types, sizes, unicode, ids, seeds and numbers as text, in every field: 2xx or 4xx, and the next request works."""
    answer = asyncio.run(ask(*body))
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error: dict[str, Any] = answer.json()["error"]
        assert error["message"]
        assert error["type"] == "invalid_request_error"
