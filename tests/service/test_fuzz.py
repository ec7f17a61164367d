"""Malformed messages on both links, a bounded number of them; `python -m tests.chaos.fuzz` sends 100,000."""

from __future__ import annotations

import pytest

from tests.chaos.fuzz import Side, fuzz, is_well, open_streams, sides
from tests.service.stack import draft_service, target_service

SIDES = {side.name: side for side in sides()}
COUNT = 400


@pytest.mark.parametrize("side", SIDES.values(), ids=SIDES)
async def test_malformed_messages_are_refused_and_leave_the_service_well(side: Side) -> None:
    """Guards the parsers: every link ends with a status that says why, and the service serves on.

    Both ways of going wrong have to occur, or the messages are not what they should be.
    """
    start = draft_service("ngram") if side.name == "draft" else target_service("stub:markov")
    async with start as port:
        outcomes = await fuzz(port, side, COUNT, seed=7)
        assert await is_well(port)
        assert await open_streams(port, side) < COUNT
    assert outcomes["INVALID_ARGUMENT"] > COUNT / 20, outcomes
    assert outcomes["OK"] + outcomes["answered"] > COUNT / 20, outcomes
