"""What the demo says, and how it ends, when the two texts differ: nothing that can be had on purpose otherwise."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from outrider import cli
from outrider.client import Answer
from outrider.commands import demo as command
from outrider.demo import Comparison
from outrider.divergence import Divergence


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Runs the demo over a comparison that comes out like this."""

    def run(divergence: Divergence | None) -> Result:
        metrics = {
            "mean_acceptance_length": 2.0,
            "draft_acceptance_rate": 0.5,
            "num_accepted_draft_tokens": 1,
            "num_draft_tokens": 2,
        }
        state = SimpleNamespace(grpc="127.0.0.1:1", target="127.0.0.1:2", model="m")
        stack = SimpleNamespace(state=state, supervisor=SimpleNamespace(stop=lambda _: None))
        comparison = Comparison(Answer(metrics=metrics), 2.0, 1.0, divergence)
        monkeypatch.setattr(command, "make_plan", lambda _: ())
        monkeypatch.setattr(command, "private", lambda *_, **__: nullcontext(stack))
        monkeypatch.setattr(command.demonstration, "compare", lambda *_, **__: comparison)
        return CliRunner().invoke(cli.app, ["demo", "--target", "stub:markov", "--draft", "stub:perfect"])

    return run


def summary(result: Result) -> dict[str, object]:
    return json.loads(result.stdout.splitlines()[-1])


def test_equal_texts_are_a_success(ended) -> None:  # type: ignore[no-untyped-def]
    """Guards the usual end."""
    result = ended(None)
    assert result.exit_code == 0, result.output
    assert summary(result)["text_identical"] is True
    assert "first_divergence" not in summary(result)


def test_a_near_tie_is_shown_and_excused(ended) -> None:  # type: ignore[no-untyped-def]
    """Guards machines whose kernels depend on the batch: the difference is printed with its gap and its noise."""
    result = ended(Divergence(token=5, gap=1e-3, noise=2e-3))
    assert result.exit_code == 0
    assert summary(result)["text_identical"] is False
    assert summary(result)["first_divergence"] == {"token": 5, "gap": 1e-3, "noise": 2e-3}


def test_an_unexplained_difference_fails_the_demo(ended) -> None:  # type: ignore[no-untyped-def]
    """Guards against a bug that passes for rounding."""
    result = ended(Divergence(token=5, gap=0.5, noise=2e-3))
    assert result.exit_code == 1
    assert summary(result)["first_divergence"]["token"] == 5  # type: ignore[index]
    assert "NOT explained" in result.stdout
