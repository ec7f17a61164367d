"""The watch over a pair's acceptance: what it says, of which rounds, and of which pair."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.acceptance_watch import AcceptanceWatch
from coordinator.request import DecodingRequest
from outrider.drift import BLOCK_ROUNDS, LEARN_BLOCKS
from outrider.planted import Plant
from outrider.sampling import SamplingParams

REQUEST = DecodingRequest(prompt_ids=(1,), params=SamplingParams())


def model(name: str) -> Any:
    return SimpleNamespace(model_id=name, weight_hash=f"hash of {name}")


def feed(watch: AcceptanceWatch, blocks: int, accepted_of_ten: int, request: DecodingRequest = REQUEST) -> None:
    for index in range(blocks * BLOCK_ROUNDS):
        watch.add(request, 1, int(index % 10 < accepted_of_ten))


def test_a_drop_is_one_warning_and_a_degraded_entry_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [100.0]
    watch = AcceptanceWatch(0.8, lambda: now_s[0])
    with caplog.at_level(logging.WARNING):
        feed(watch, 20, 8)
        assert watch.degraded == []
        feed(watch, 20, 4)
    assert len(caplog.records) == 1
    now_s[0] += 60
    (entry,) = watch.degraded
    assert (entry.part, entry.since_s) == ("acceptance", 60.0)
    assert "baseline is 80.0%" in entry.reason
    assert watch.view.drop == pytest.approx(0.4, abs=0.02)
    feed(watch, 20, 8)
    assert watch.degraded == []


def test_the_baseline_is_learnt_and_said(caplog: pytest.LogCaptureFixture) -> None:
    watch = AcceptanceWatch(None)
    with caplog.at_level(logging.INFO):
        feed(watch, LEARN_BLOCKS, 7)
    assert watch.view.baseline == pytest.approx(0.7, abs=0.01)
    assert "--acceptance-baseline 0.70" in caplog.text


def test_rounds_that_are_wrong_on_purpose_do_not_count() -> None:
    watch = AcceptanceWatch(0.8)
    feed(watch, 20, 0, replace(REQUEST, synthetic=0.1))
    feed(watch, 20, 0, replace(REQUEST, planted=next(plant for plant in Plant if plant is not Plant.NONE)))
    for _ in range(20 * BLOCK_ROUNDS):
        watch.add(REQUEST, 0, 0)  # a proposal whose q was malformed from the start
    assert watch.view.recent is None and watch.degraded == []


def test_another_pair_is_watched_anew_and_the_same_one_after_a_restart_is_not() -> None:
    watch = AcceptanceWatch(None)
    watch.pair(model("large"), model("small"))
    feed(watch, LEARN_BLOCKS, 7)
    watch.pair(model("large"), None)
    watch.pair(model("large"), model("small"))
    assert watch.view.baseline is not None
    watch.pair(model("large"), model("other"))
    assert watch.view.baseline is None
