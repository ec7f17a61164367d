"""Acceptance at a set rate: it holds for those who asked for it, and nobody gets it by mistake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coordinator.arguments import parse
from coordinator.config import DecoderConfig
from coordinator.front import Front, FrontConfig
from coordinator.prepare import Policy
from coordinator.request import DecodingRequest
from coordinator.round_plan import RoundPlan
from coordinator.state import new_stream
from coordinator.synthetic import synthetic_counts
from outrider.errors import InvalidArgument
from outrider.sampling import SamplingParams
from tests.scripted_decoder import ScriptedDecoder


def counts(rate: float | None, streams: int = 2000, gamma: int = 3) -> np.ndarray:  # type: ignore[type-arg]
    request = DecodingRequest(prompt_ids=(1,), params=SamplingParams(), synthetic=rate)
    states = [new_stream(index, request, seed=index) for index in range(streams)]
    m = np.full(streams, gamma)
    return synthetic_counts(states, np.full(streams, 2), m, np.tile(np.arange(gamma), streams))


def test_slots_are_accepted_at_the_rate_and_in_order() -> None:
    """k must be what independent coins give: its mean is s + s^2 + s^3."""
    assert counts(0.7).mean() == pytest.approx(0.7 + 0.49 + 0.343, abs=0.09)
    assert set(counts(1.0)) == {3}
    assert set(counts(0.0)) == {0}


def test_exact_requests_keep_what_the_rule_says() -> None:
    """The planted error of all planted errors: a rate that reaches a request which wants a text."""
    assert set(counts(None)) == {2}


@pytest.mark.parametrize(("rate", "gamma", "least"), [(None, None, 0.3), (0.8, None, 0.0), (None, 4, 0.0)])
def test_an_unsure_draft_is_not_stopped_where_a_rate_accepts(
    rate: float | None, gamma: int | None, least: float
) -> None:
    """Guards figures against a draft of random weights that stops at once because it is sure of nothing."""
    nothing: Any = None
    plan = RoundPlan(DecoderConfig(target=("t",)), nothing, nothing, nothing, nothing)
    plan.controller = SimpleNamespace(least_survival=0.3)  # type: ignore[assignment]
    request = DecodingRequest(prompt_ids=(1,), params=SamplingParams(), synthetic=rate, num_speculative_tokens=gamma)
    stream: Any = SimpleNamespace(state=new_stream(1, request, seed=1))
    assert plan.least_survival(stream) == least


@pytest.mark.parametrize(
    "fields",
    [
        {"rejection_sample_method": "synthetic"},
        {"synthetic_acceptance": 0.8},
        {"rejection_sample_method": "synthetic", "synthetic_acceptance": 1.5},
    ],
)
def test_synthetic_needs_to_be_said_twice(fields: dict[str, object]) -> None:
    """A server that accepts at a set rate serves no text, so neither flag alone may make it one."""
    with pytest.raises(InvalidArgument):
        Policy(**fields)  # type: ignore[arg-type]


def test_command_line_refuses_half_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--rejection-sample-method", "synthetic"])
    assert "measuring only" in capsys.readouterr().err
    given = parse(["--rejection-sample-method", "synthetic", "--synthetic-acceptance", "0.8"])
    assert given.front.policy.synthetic_acceptance == 0.8


@pytest.mark.parametrize(
    ("fields", "value"), [({}, -1), ({"rejection_sample_method": "synthetic", "synthetic_acceptance": 0.8}, 0.8)]
)
async def test_metric_says_so(fields: dict[str, object], value: float) -> None:
    """Whoever reads throughput off a dashboard has to see that it is not a served text's."""
    text = Front(ScriptedDecoder(), FrontConfig(policy=Policy(**fields))).metrics.render().decode()  # type: ignore[arg-type]
    assert f"outrider:synthetic_acceptance {value:.1f}" in text
