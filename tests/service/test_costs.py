"""What services measure of themselves, from their engine threads over gRPC to the coordinator's plan."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator import profiles
from outrider.cli import app
from outrider.engine import idle_work
from tests.service.stack import answer, answers, decoder, draft_service, pair, request, target_service, until

TARGET = "stub:markov?fixed_ms=2&free_tokens=4&token_ms=0.1"
SMALL = {"max_num_seqs": 2, "max_slots": 2}
WITHIN_S = 100.0
"""Far above what a loaded machine needs for some hundred passes of milliseconds."""


async def test_coordinator_takes_up_what_idle_services_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured after readiness, and asked for until it is there: the coordinator connects long before that."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(idle_work, "IDLE_AFTER_S", 0.0)
    monkeypatch.setattr(profiles, "ASK_S", 0.1)
    async with (
        target_service(TARGET, profile_seconds=10.0, **SMALL) as target_port,
        draft_service("stub:perfect?token_ms=1", profile_seconds=10.0, **SMALL) as draft_port,
        decoder(target_port, draft_port) as made,
    ):
        said = await answer(made, request([65, 66], 24, temperature=0.0))
        assert len(said.tokens) == 24
        await until(lambda: made.costs.target_profile is not None and made.costs.draft_profile is not None, WITHIN_S)
        assert made.costs.target_profile is not None
        assert made.costs.target_profile.fit.floor_s >= 0.002
        assert made.costs.draft_link_s > 0
    # The next process has them at once.
    async with target_service(TARGET, **SMALL) as target_port, decoder(target_port) as made:
        await until(lambda: made.costs.target_profile is not None)
        assert made.costs.target_profile is not None
        assert made.costs.target_profile.source == "cache"
        shown = await asyncio.to_thread(CliRunner().invoke, app, ["costs", "--target", f"127.0.0.1:{target_port}"])
        assert "measured at an earlier start" in shown.stdout
        assert "3 tokens" in shown.stdout
        read = await asyncio.to_thread(
            CliRunner().invoke, app, ["costs", "--json", "--target", f"127.0.0.1:{target_port}"]
        )
        assert json.loads(read.stdout)["services"]["target"]["fit"]["floor_s"] >= 0.002


async def test_synthetic_acceptance_separates_the_system_from_the_draft() -> None:
    """A draft whose every token is wrong looks like one that is right three times in four, and only where asked for."""
    async with pair("stub:markov", "stub:wrong", num_speculative_tokens=4) as made:
        exact, synthetic = await answers(
            made, [request([65], 400, temperature=0.0), request([65], 2000, temperature=0.0, synthetic=0.75)]
        )
    assert exact.stats.num_accepted_draft_tokens == 0
    accepted = synthetic.stats.num_accepted_draft_tokens / synthetic.stats.num_tested_tokens
    assert accepted == pytest.approx(0.75, abs=0.05)
    assert synthetic.stats.synthetic
