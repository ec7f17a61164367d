"""How long the decoder waits for a draft that says nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from coordinator.config import DecoderConfig
from coordinator.costs import Costs
from coordinator.counters import Counters
from coordinator.draft_side import DraftSide
from coordinator.request import DecodingRequest
from coordinator.state import new_stream
from coordinator.streams import Registry, Stream
from outrider.sampling import SamplingParams

STREAMS, PROMPT = 10, 20
TOKEN_S = 0.001


class MuteLink:
    """A link that is up and over which nothing ever comes back."""

    is_up = True
    info = None

    def post(self, *_: Any) -> None: ...

    def withdraw(self, *_: Any) -> None: ...


async def test_prompts_that_arrive_together_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst is read in few steps, so the first prompt may take as long as all of them: that is no sign of a hang.

    By itself it would be given a tenth of the time. A draft that stays mute is found out all the same.
    """
    monkeypatch.setattr("coordinator.patience.CATCH_UP_LIMIT_S", 0.0)
    monkeypatch.setattr("coordinator.patience.CATCH_UP_TOKEN_S", TOKEN_S)
    counters, streams = Counters(), Registry()
    config = DecoderConfig(target=("127.0.0.1:1",))
    none: dict[str, Any] = {"target": lambda: None, "proposed": lambda _: None, "plain": lambda _: None}
    side = DraftSide(config, b"", streams, Costs(), counters, **none)
    side.link = MuteLink()  # type: ignore[assignment]
    began = time.monotonic()
    for number in range(STREAMS):
        request = DecodingRequest(prompt_ids=(1,) * PROMPT, params=SamplingParams())
        stream = Stream(new_stream(number, request, seed=0), began + 60, lambda _: None)
        streams.add(stream)
        side.catch_up(stream)
    async with asyncio.timeout(30):
        while side.health.out_reason is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert time.monotonic() - began >= 0.99 * TOKEN_S * STREAMS * PROMPT
