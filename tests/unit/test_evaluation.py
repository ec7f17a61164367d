"""Judging a draft: what is read from answers, what is predicted from it, and what is printed."""

from __future__ import annotations

import io
import json
import random
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from rich.console import Console

from loadtest.commands.evaluate import evaluate_draft
from loadtest.evaluation import measure
from loadtest.evaluation.acceptance import Acceptance, count, wilson
from loadtest.evaluation.measure import DEPTH, Found, Setting
from loadtest.evaluation.plot import draw
from loadtest.evaluation.prediction import Costs, best_gamma, costs_of, predict, stretches
from loadtest.evaluation.reading import Arrival, Reading, rate, read, round_s, rounds
from loadtest.evaluation.result import DraftResult, improvements, ranked, table
from loadtest.evaluation.sample import numbers, spread
from loadtest.prompts import Prompt
from loadtest.series import parse
from outrider.costs import Curve
from outrider.economics import improvement
from outrider.errors import InvalidArgument, Unavailable
from outrider.local.options import StackOptions

FLAT = Costs(Curve(np.array([1.0, 16.0]), np.array([0.1, 0.1])), tuple(0.01 * g for g in range(1, DEPTH + 1)), 0.0)
"""A pass of 100 ms whatever its rows, a drafted token of 10 ms, no way to go."""
THEOREM = {0: 0.1, 1: 0.11, 3: 0.13, 8: 0.18}
"""The same by rounds: theorem 3.8 with c = .1."""


def simulated(alpha: float, gamma: int, tokens: int, costs: Costs, seed: int, task: str = "t") -> Reading:
    """An answer on a clock of its own: every drafted token is accepted by a coin."""
    rng, arrivals, now_s = random.Random(seed), [Arrival(0.0, drafted=False)], 0.0
    tested = accepted = drafts = 0
    while len(arrivals) < tokens:
        room = min(gamma, tokens - len(arrivals) - 1)
        now_s += float(costs.step(room + 1)) + (costs.proposal[room - 1] + costs.link_s if room else 0.0)
        got = 0
        while got < room and rng.random() < alpha:
            got += 1
        tested, accepted, drafts = tested + min(room, got + 1), accepted + got, drafts + (room > 0)
        arrivals += [Arrival(now_s, drafted=True)] * got + [Arrival(now_s, drafted=False)]
    whole = read(task, gamma, arrivals, limit=tokens, depth=DEPTH)
    return Reading(
        task, gamma, whole.accepted, whole.tokens, whole.seconds, whole.steps, drafts, whole.rounds, tested, accepted
    )


def judged(draft: str, alpha: float, costs: Costs = FLAT, *, answers: int = 8) -> DraftResult:
    """A draft as `measure.evaluate` would find it, by simulation."""
    learnt = [simulated(alpha, g, 200, costs, seed, f"t{seed % 2}") for seed in range(answers) for g in (0, 1, 3, 8)]
    predicted = predict(count(learnt, DEPTH).by_position, learnt, round_s(learnt))
    measured = {g: [simulated(alpha, g, 200, costs, 100 + seed) for seed in range(answers)] for g in (0, 1, 4)}
    return DraftResult(draft, (Found(Setting(0.0, "greedy"), tuple(learnt), costs, predicted, measured),))


def test_rounds_are_told_apart_by_their_last_token() -> None:
    """Guards acceptance against pieces that the wire joined or split: only the tokens' own flags count."""
    arrivals = [Arrival(0.0, drafted=flag) for flag in (False, True, True, False, False, True)]
    assert rounds(arrivals) == [0, 2, 0]


def test_rounds_without_room_are_left_out() -> None:
    """Guards deep positions: near the limit less is drafted than was asked for, which is no rejection."""
    arrivals = [Arrival(float(n), drafted=False) for n in range(20)]
    got = read("t", 4, arrivals, limit=20, depth=8)
    assert len(got.accepted) == 12
    assert (got.tokens, got.seconds, got.steps) == (11, 11.0, 11)
    assert round_s([got]) == {4: 1.0}
    assert rate([got]) == 1.0
    assert rate([read("t", 0, [], limit=20, depth=8)]) == 0.0


def test_positions_count_only_where_gamma_reached() -> None:
    """Guards the second position from rounds that could not draft it."""
    one = Reading("t", 1, (1, 1, 0), 5, 1.0, tested=3, accepted_tokens=2, drafts=3, rounds=3)
    three = Reading("t", 3, (3, 1), 6, 1.0, tested=5, accepted_tokens=4, drafts=2, rounds=2)
    plain = Reading("t", 0, (0, 0), 2, 1.0, rounds=2)
    found = count([one, three, plain], 4)
    assert found.reached == (5, 2, 1, 0)
    assert found.accepted == (4, 1, 1, 0)
    assert found.by_position == [0.8, 0.5, 1.0, 0.0]
    assert found.alpha == 6 / 8
    assert found.as_json()["drafted_rounds"] == 1.0


def test_wilson_agrees_with_the_published_interval() -> None:
    """Guards the formula: 81 of 263 gives .255 to .366 (Newcombe, 1998, table I); nothing tried says nothing."""
    low, high = wilson(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_a_flat_pass_gives_the_theorem(gamma: int) -> None:
    """Guards the prediction against the closed form, (1 - a^(g+1)) / ((1 - a)(gc + 1))."""
    predicted = predict([0.8] * DEPTH, [], THEOREM)
    assert predicted[gamma] == pytest.approx(improvement(0.8, gamma, 0.1))
    assert predicted[gamma] == pytest.approx((1 - 0.8 ** (gamma + 1)) / (0.2 * (gamma * 0.1 + 1)))


def test_costs_that_matter_move_the_best_gamma() -> None:
    """Guards against a choice by acceptance alone: rows that cost, a way that is long, a draft that is never right."""
    steep = {0: 0.1, 1: 0.16, 8: 0.58}
    acceptance = [0.8] * DEPTH
    assert best_gamma(predict(acceptance, [], steep)) < best_gamma(predict(acceptance, [], THEOREM)) == 6
    far = {0: 0.1, 1: 1.11, 8: 1.18}
    assert best_gamma(predict(acceptance, [], far)) == 0
    assert best_gamma(predict([0.0] * DEPTH, [], THEOREM)) == 0


def test_costs_are_read_from_the_series() -> None:
    """Guards c and the way: the slope of the proposal's cost is the draft's, the rest is the link's."""
    lines = [f'outrider:cost_seconds{{side="target",size="{rows}"}} 0.1' for rows in (1, 2, 4, 8, 16)]
    lines += [f'outrider:cost_seconds{{side="draft",size="{g}"}} {0.002 + 0.01 * g}' for g in range(1, 9)]
    costs = costs_of(parse("\n".join([*lines, "outrider:link_seconds 0.003", ""])))
    assert costs.c == pytest.approx(0.1)
    assert costs.way_s == pytest.approx(0.005)
    with pytest.raises(Unavailable):
        costs_of(parse('outrider:cost_seconds{side="target",size="1"} 0.1\n'))


def test_what_was_predicted_is_what_a_simulation_measures() -> None:
    """Guards the whole reckoning, from arrivals to both figures, on a clock without noise; and its planted error."""
    found = judged("good", 0.8, answers=24).found[0]
    assert found.acceptance().alpha == pytest.approx(0.8, abs=0.03)
    for gamma, value in improvements(found).items():
        assert value / found.predicted[gamma] == pytest.approx(1, abs=0.05)
    free = dict.fromkeys((0, 1, 8), 0.1)  # the draft's time forgotten
    wrong = predict(found.acceptance().by_position, [], free)
    assert improvements(found)[4] / wrong[4] < 0.9


def copied(gamma: int, tokens: int, seed: int) -> Reading:
    """An answer of stretches that are copied, and always accepted, between stretches that never are; 100 ms a round."""
    rng = random.Random(seed)
    is_copied: list[bool] = []
    while len(is_copied) < tokens + DEPTH:
        is_copied += [True] * rng.randint(6, 30) + [False] * rng.randint(6, 30)
    arrivals, now_s = [Arrival(0.0, drafted=False)], 0.0
    while len(arrivals) < tokens:
        now_s += 0.1
        run = is_copied[len(arrivals) :]
        got = min(next(n for n, one in enumerate([*run, False]) if not one), gamma)
        arrivals += [Arrival(now_s, drafted=True)] * got + [Arrival(now_s, drafted=False)]
    return read("t", gamma, arrivals, limit=tokens, depth=DEPTH)


def test_acceptance_in_stretches_is_predicted() -> None:
    """Guards look-ups: taken for coins, their acceptance promises too little at gamma 1 and too much at gamma 8."""
    learnt = [copied(gamma, 400, seed) for seed in range(8) for gamma in (0, 1, 3, 8)]
    shares, flat = count(learnt, DEPTH).by_position, {0: 0.1, 1: 0.1, 8: 0.1}
    predicted, coins = predict(shares, learnt, flat), predict(shares, [], flat)
    for gamma in range(1, DEPTH + 1):
        answers = [copied(gamma, 400, seed) for seed in range(8)]
        measured = 0.1 * rate(answers)
        assert measured / predicted[gamma] == pytest.approx(1, abs=0.06), gamma
    assert 0.1 * rate([copied(1, 400, seed) for seed in range(8)]) / coins[1] > 1.06


def test_chance_alone_moves_no_prediction_far() -> None:
    """Guards the other side: few rounds of an even draft must not pass for stretches."""
    learnt = [simulated(0.8, gamma, 64, FLAT, seed) for seed in range(4) for gamma in (0, 1, 3, 8)]
    factors = stretches(count(learnt, DEPTH).by_position, learnt)
    assert factors.keys() == {1, 3, 8}
    assert all(0.9 < factor < 1.1 for factor in factors.values())


def test_the_picture_is_drawn_from_the_line() -> None:
    """Guards the file beside the JSON: every draft and setting finds its place in it."""
    results = [one.as_json() for one in (judged("good", 0.8), judged("poor", 0.3))]
    assert draw(results).startswith(b"\x89PNG")


def test_drafts_are_ranked_by_what_was_measured_and_printed_whole() -> None:
    """Guards programs that read the line, and people that read the table."""
    results = ranked([judged("poor", 0.3), judged("good", 0.8)])
    assert [one.draft for one in results] == ["good", "poor"]
    line = json.loads(json.dumps([one.as_json() for one in results]))
    wanted = {"draft", "alpha", "c", "acceptance_per_position", "predicted", "measured", "best_gamma"}
    assert wanted <= line[0].keys()
    assert list(line[0]["predicted"]) == [str(gamma) for gamma in range(1, DEPTH + 1)]
    assert line[0]["measured"].keys() == {"1", "4"}
    assert line[0]["best_gamma"] in (5, 6, 7)
    low, high = line[0]["measured_intervals"]["4"]
    assert low <= line[0]["measured"]["4"] <= high
    assert line[0]["settings"][0]["tasks"].keys() == {"t0", "t1"}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(results[0]))
    text = console.export_text()
    assert "temperature 0" in text
    assert "t1" in text


def test_nothing_tested_divides_by_nothing() -> None:
    """Guards a draft that never proposes."""
    empty = Acceptance((0,) * 2, (0,) * 2, 0, 0, 0, 0)
    assert empty.alpha == 0.0
    assert empty.by_position == [0.0, 0.0]
    assert empty.as_json()["drafted_rounds"] == 0.0


def test_prompts_are_taken_from_the_tasks_in_turn() -> None:
    """Guards a small evaluation from seeing one task only."""
    prompts = [Prompt(str(n), task) for task in "ab" for n in range(3)]
    assert [prompt.task for prompt in spread(prompts, 5)] == ["a", "b", "a", "b", "a"]
    with pytest.raises(InvalidArgument, match="at most 6"):
        spread(prompts, 7)


@pytest.mark.parametrize("text", ["", "x", "0", "9", "1.5", "1,,2"])
def test_numbers_out_of_range_are_refused(text: str) -> None:
    """Guards against a gamma that the server would refuse minutes later."""
    with pytest.raises(InvalidArgument) as refused:
        numbers("gamma", text, 1, DEPTH, whole=True)
    assert refused.value.field == "gamma"
    assert numbers("gamma", "4,1,4", 1, DEPTH, whole=True) == [4.0, 1.0]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"prompts": 0}, "prompts"),
        ({"prompts": 10_000}, "prompts"),
        ({"max_tokens": 8}, "max-tokens"),
        ({"draft": ["ngram", "none"]}, "draft"),
        ({"temperature": "-1"}, "temperature"),
        ({"gamma": "9"}, "gamma"),
    ],
)
def test_the_command_refuses_before_it_starts_anything(given: dict[str, Any], field: str) -> None:
    """Guards against minutes of starting for a mistake in the last flag."""
    with pytest.raises(InvalidArgument) as refused:
        evaluate_draft(**{"draft": ["ngram"], **given})
    assert refused.value.field == field


def test_a_draft_that_fails_does_not_lose_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against minutes of measuring that are thrown away because a later draft cannot be loaded."""

    def services(options: StackOptions, say: object) -> AbstractContextManager[object]:
        if options.draft == "broken":
            raise Unavailable("no such draft")
        return nullcontext(SimpleNamespace(grpc="", url=""))

    monkeypatch.setattr("loadtest.stacks.own_services", services)
    monkeypatch.setattr("outrider.client.Client", lambda _: nullcontext())
    monkeypatch.setattr(measure, "Pair", lambda *_: SimpleNamespace(warm_up=lambda _: None))
    monkeypatch.setattr(measure, "evaluate", lambda *_: judged("good", 0.8).found[0])
    with pytest.raises(typer.Exit) as left:
        evaluate_draft(["broken", "good"], temperature="0", gamma="1,4", prompts=1, max_tokens=64, as_json=True)
    assert left.value.exit_code == 1
    said = capsys.readouterr()
    assert [one["draft"] for one in json.loads(said.out)] == ["good"]
    assert "no such draft" in said.err


def test_stopping_a_measurement_keeps_what_was_learnt() -> None:
    """Guards a prediction that cost minutes; prompts that not every arm answered are left out of the comparison."""
    lines = [f'outrider:cost_seconds{{side="target",size="{rows}"}} 0.1' for rows in (1, 2, 4, 8, 16)]
    lines += [f'outrider:cost_seconds{{side="draft",size="{g}"}} {0.01 * g}' for g in range(1, 9)]
    series = parse("\n".join([*lines, "outrider:link_seconds 0.001", ""]))
    asked: list[int] = []

    def ask(_prompt: Prompt, _setting: Setting, gamma: int, seed: int) -> Reading:
        asked.append(gamma)
        if len(asked) > 2 * 4 + 7:  # both prompts learnt, one measured with every arm, the other with a few
            raise KeyboardInterrupt
        return simulated(0.8, gamma, 64, FLAT, seed)

    pair: Any = SimpleNamespace(ask=ask, series=lambda: series)
    prompts = [Prompt("a", "t"), Prompt("b", "t")]
    with pytest.raises(measure.Stopped) as stopped:
        measure.evaluate(pair, prompts, Setting(0.0, "greedy"), [1, 2, 4], lambda _: None)
    found = stopped.value.found
    assert len(found.learnt) == 8
    assert {len(own) for own in found.measured.values()} == {1}
    assert improvements(found).keys() >= {1, 2, 4}


def test_stopping_says_what_was_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Guards minutes of measuring against Ctrl-C and SIGTERM, and the services against staying behind."""
    ended: list[str] = []

    @contextmanager
    def services(options: StackOptions, say: object) -> Iterator[object]:
        try:
            yield SimpleNamespace(grpc="", url="")
        finally:
            ended.append(options.draft)

    def evaluate(_pair: object, _prompts: object, setting: Setting, *_: object) -> Found:
        if setting.rule == "coupled":
            signal.raise_signal(signal.SIGTERM)
        return judged("good", 0.8).found[0]

    monkeypatch.setattr("loadtest.stacks.own_services", services)
    monkeypatch.setattr("outrider.client.Client", lambda _: nullcontext())
    monkeypatch.setattr(measure, "Pair", lambda *_: SimpleNamespace(warm_up=lambda _: None))
    monkeypatch.setattr(measure, "evaluate", evaluate)
    monkeypatch.setattr("loadtest.evaluation.plot.draw", lambda _: b"picture")
    with pytest.raises(typer.Exit) as left:
        evaluate_draft(["good", "never"], temperature="0,1", gamma="1,4", prompts=1, max_tokens=64, out=tmp_path)
    assert left.value.exit_code == 130
    assert ended == ["good"]
    said = capsys.readouterr()
    (line,) = json.loads(said.out.splitlines()[-1])
    assert (line["draft"], len(line["settings"])) == ("good", 2)
    assert "2 of 3 settings judged" in said.err
    assert json.loads((tmp_path / "evaluation.json").read_text()) == [line]
    assert (tmp_path / "evaluation.png").read_bytes() == b"picture"
