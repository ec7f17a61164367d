"""A stack for whoever wants to see the pair at work."""

from __future__ import annotations

import httpx
import pytest

from outrider.local import stack


@pytest.mark.parametrize(("attaches_at", "attached"), [(3, True), (1_000_000, False)])
def test_a_draft_that_is_just_attaching_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, attaches_at: int, attached: bool
) -> None:
    """Guards against "no draft is attached" on a stack just started, and against a wait without end."""
    now_s, asked = [0.0], list[str]()

    def get(url: str, **_: object) -> httpx.Response:
        asked.append(url)
        return httpx.Response(200, json={"draft": {"kind": "ngram"} if len(asked) >= attaches_at else None})

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(stack.httpx, "get", get)
    monkeypatch.setattr(stack.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(stack.time, "sleep", sleep)
    assert stack._attached("http://here", 15.0) is attached
    assert set(asked) == {"http://here/ready"}
    assert now_s[0] == pytest.approx(0.2 if attached else 15.0, abs=0.11)
