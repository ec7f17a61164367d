"""`outrider demo` from its first line to its last, which is for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.commands import outrider, relatives_gone

TEXT = "one two one two one two one two"
SCRIPT = "tokens=" + ",".join(map(str, TEXT.encode())) + "&eos=257"
SUMMARY = {
    "target",
    "draft",
    "tokens_per_s",
    "tokens_per_s_plain",
    "speedup",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "text_identical",
}


def test_the_demo_shows_its_steps_and_ends_with_one_object(tmp_path: Path) -> None:
    """Guards the first thing that anyone runs: every step is said, the text is shown, and nothing stays behind."""
    pair = ("--target", f"stub:script?{SCRIPT}&fixed_ms=10", "--draft", f"stub:perfect?{SCRIPT}")
    done = outrider(tmp_path, "demo", *pair, "--max-tokens", "64")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert [f"[{step}/5]" for step in range(1, 6)] == [line.split()[0] for line in lines if line.startswith("[")]
    assert TEXT in lines
    summary = json.loads(last)
    assert set(summary) == SUMMARY
    assert summary["text_identical"] is True
    assert summary["draft_acceptance_rate"] == 1.0
    assert summary["mean_acceptance_length"] > 2
    assert relatives_gone(tmp_path) == []


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_default_pair_gives_identical_text(default_model_dir: Path) -> None:
    """Guards the promise on the pair that the demo shows, in the precision that it serves.

    How much is drafted is the controller's choice, which depends on the machine.
    """
    done = outrider(None, "demo", "--max-tokens", "48", timeout_s=500.0)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["text_identical"] or "first_divergence" in summary
