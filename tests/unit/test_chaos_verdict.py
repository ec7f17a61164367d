"""The chaos suite's own judgement: every bad end of a request is seen, and excused by nothing but its fault."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.chaos import load
from tests.chaos.load import Attempt, Load, Question, Text
from tests.chaos.verdict import Fault, table, unexcused

RETRY = {"retry-after": "1"}


def frames(*values: Any, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(value)}\n\n" for value in values]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


def piece(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": reason}]}


@pytest.mark.parametrize(
    ("response", "end"),
    [
        (httpx.Response(200, content=frames(piece("ab"), piece("c", "length"))), load.OK),
        (httpx.Response(200, content=frames(piece("ab"), piece("d", "length"))), load.WRONG),
        (httpx.Response(200, content=frames(piece("abc", "stop"))), load.WRONG),
        (httpx.Response(200, content=frames(piece("abc", "length"), done=False)), load.CUT),
        (httpx.Response(200, content=frames(piece("abc"))), load.CUT),
        (httpx.Response(200, content=frames(piece("ab"), {"error": {"message": "gone"}})), load.ERROR),
        (httpx.Response(429, json={"error": {"message": "full"}}, headers=RETRY), load.REFUSED),
        (httpx.Response(503, json={"error": {"message": "away"}}, headers=RETRY), load.UNAVAILABLE),
        (httpx.Response(503, json={"error": {"message": "away"}}), load.BARE),
        (httpx.Response(500, text="Internal Server Error"), load.BARE),
        (httpx.Response(500, json={"error": {"message": "a defect"}}), load.ERROR),
    ],
)
async def test_every_end_has_its_name(response: httpx.Response, end: str) -> None:
    """Guards against a client that takes a wrong or truncated text, or a bare error, for an answer."""
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: response)) as http:
        asked = [Question({"prompt": "a", "stream": True}, Text("abc", "length"))]
        (attempt,) = await Load(http, lambda: ["http://coordinator"], asked).burst(1)
    assert attempt.end == end


def test_a_fault_excuses_what_it_explains_and_nothing_else() -> None:
    """Guards against a lost request that is laid to a fault of another kind, or of another time."""
    restarted = Fault("coordinator restarted", 100.0, 110.0, 111.0)
    killed = Fault("coordinator killed", 200.0, 210.0, 211.0)
    draft = Fault("draft killed", 300.0, 301.0, 302.0)
    fine = [
        Attempt(1, 101.0, 101.1, load.UNREACHABLE, ""),
        Attempt(2, 190.0, 200.5, load.CUT, ""),
        Attempt(3, 299.0, 310.0, load.OK, ""),
    ]
    lost = [
        Attempt(4, 99.0, 100.5, load.CUT, "ran when the restart began"),
        Attempt(5, 150.0, 150.1, load.UNAVAILABLE, "between two faults"),
        Attempt(6, 201.0, 202.0, load.WRONG, "no fault excuses a wrong text"),
        Attempt(7, 201.0, 290.0, load.HANG, "nor a hang"),
        Attempt(8, 300.5, 300.6, load.UNAVAILABLE, "a draft is no outage"),
    ]
    faults = [restarted, killed, draft]
    assert unexcused(faults, fine) == []
    found = unexcused(faults, [*fine, *lost])
    assert [any(attempt.detail in line for line in found) for attempt in lost] == [True] * 5
    assert len(found) == 5
    draft_row = table(faults, [*fine, *lost]).splitlines()[1].split()
    assert draft_row == ["draft", "killed", "1", "2", "1", "1", "0", "1.0", "s"]


def test_an_end_is_counted_where_it_is_explained() -> None:
    """Guards the table against answers that a coordinator cut and that stand in the row of the draft beside it."""
    faults = [Fault("draft killed", 100.0, 101.0, 102.0), Fault("coordinator killed", 104.0, 105.0, 106.0)]
    attempts = [
        Attempt(1, 101.5, 104.5, load.CUT, "by the coordinator"),
        Attempt(2, 101.5, 104.5, load.OK, ""),
        Attempt(3, 101.0, 101.5, load.HANG, "by nobody"),
    ]
    drafts, coordinators = (line.split()[2:7] for line in table(faults, attempts).splitlines()[1:])
    assert drafts == ["1", "2", "1", "0", "1"]
    assert coordinators == ["1", "2", "1", "0", "1"]
