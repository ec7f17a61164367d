"""Asking the target whether a difference is a near tie."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from outrider.divergence import Divergence, first_difference, measure
from tests.service.stack import target_service


def test_first_difference_sees_a_changed_and_a_missing_token() -> None:
    """Guards against texts of unequal length that pass as equal."""
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


async def test_the_gap_is_the_targets_own_and_a_stub_has_no_noise(tmp_path: Path) -> None:
    """Guards the probe: with p = (.6, .3, .1) behind every token the gap is log 2, and equal passes make no noise."""
    table = tmp_path / "table.json"
    table.write_text(json.dumps([[0.6, 0.3, 0.1]] * 3))
    async with target_service(f"stub:markov?table={table}") as port:
        found = await asyncio.to_thread(measure, f"127.0.0.1:{port}", [0, 1, 2], [0, 0, 1, 2, 0], 3)
    assert found.token == 3
    assert abs(found.gap - 0.6931) < 1e-3
    assert found.noise == 0.0
    assert not found.explained, "a planted difference is no near tie"


def test_a_gap_below_the_noise_is_explained() -> None:
    """Guards the verdict's direction."""
    assert Divergence(token=0, gap=1e-4, noise=1e-3).explained
    assert not Divergence(token=0, gap=1e-3, noise=1e-4).explained
