"""The sweep: windows, intervals, crossovers, and what it writes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from coordinator.counters import Counters
from coordinator.decoding_series import DecodingSeries
from coordinator.schedule import read_schedule
from loadtest import bootstrap, page, report, window
from loadtest.analysis import Analysis, analyse, conditional, device_costs
from loadtest.cells import Cell, CellResult, Grid, Visit, parse_grid, speculation_field
from loadtest.client import Client, Endpoint
from loadtest.crossover import crossing, crossover, falling
from loadtest.outcome import Outcome, Piece
from loadtest.prompts import Prompt, PromptPool, PromptSet
from loadtest.schedule import ranges
from loadtest.series import parse
from loadtest.stacks import parse_cpus
from loadtest.steps import REST, StepCost, steps
from loadtest.sweep import Sweep, SweepOptions
from outrider.economics import LinearCost, tokens_per_s
from outrider.errors import InvalidArgument
from outrider.planning.prices import parse_prices
from outrider.seam import Timings
from tests.unit.fake_openai import END, Request, failing, frame, serving, usage

BATCHES = (1, 8, 10, 12, 14, 15, 16, 32)


def stream(*pieces: tuple[float, int]) -> Outcome:
    """An answer whose pieces arrive at these times with these running counts."""
    made = tuple(Piece(at, tokens) for at, tokens in pieces)
    return Outcome(
        task="t",
        planned_s=0.0,
        sent_s=0.0,
        end_s=made[-1].at_s,
        first_s=made[0].at_s,
        pieces=made,
        output_tokens=made[-1].tokens or 0,
        prompt_tokens=3,
    )


class TestWindow:
    def test_only_the_time_in_which_all_streams_decode_counts(self) -> None:
        """Guards against batches that look slow because some streams had not begun, or had ended."""
        first = stream(*((0.1 * n, n + 1) for n in range(30)))
        late = stream(*((1.0 + 0.2 * n, 2 * n + 1) for n in range(30)))
        seen = window.measure([first, late])
        assert seen.rates == (pytest.approx(10.0), pytest.approx(10.0))
        assert seen.seconds == pytest.approx(1.8)

    def test_no_round_is_cut_at_an_edge(self) -> None:
        """Guards the rate against a round whose tokens fall in and whose time does not, and against the last one."""
        even = stream((0.0, 1), (1.0, 5), (2.0, 9), (3.0, 10))
        assert window.measure([even]).rates == (pytest.approx(4.0),)

    def test_answers_that_never_overlap_are_refused(self) -> None:
        """Guards against a figure for a batch that never existed."""
        with pytest.raises(window.TooShort):
            window.measure([stream((0.0, 1), (0.1, 2), (0.2, 3)), stream((5.0, 1), (5.1, 2), (5.2, 3))])
        with pytest.raises(ValueError, match="continuous_usage_stats"):
            window.measure(
                [Outcome(task="t", planned_s=0, sent_s=0, end_s=3, pieces=tuple(Piece(n, None) for n in range(4)))]
            )


class TestCrossover:
    def test_between_neighbours(self) -> None:
        """Guards the interpolation, and both ends of the grid."""
        assert crossing([8, 16], [1.2, 0.8]) == 12.0
        assert crossing([1, 8, 16], [1.5, 1.1, 1.05]) == math.inf
        assert crossing([1, 8], [0.9, 0.8]) == 0.0

    def test_a_noisy_cell_does_not_cross_twice(self) -> None:
        """Guards against a crossover at the first cell that falls below 1 by chance."""
        curve = falling([1.5, 0.99, 1.2, 0.7])
        assert curve.tolist() == pytest.approx([1.5, 1.095, 1.095, 0.7])
        assert 10 < crossing([1, 8, 10, 16], [1.5, 0.99, 1.2, 0.7]) < 16

    def test_intervals_cover_the_truth(self) -> None:
        """Guards the bootstrap: of 60 synthetic sweeps, about 95 % of the intervals hold the true crossover."""
        rng = np.random.default_rng(3)
        truth = {batch: 2.0 - batch / 12 for batch in (2, 8, 11, 13, 16)}
        held = 0
        for _ in range(60):
            draws, ratios = [], []
            for batch, ratio in truth.items():
                moment = rng.normal(1, 0.1, size=6)
                plain = [rng.normal(10 * shift, 0.5, size=batch) for shift in moment]
                arm = [
                    rng.normal(10 * ratio * shift, 0.5, size=batch) for shift in moment * rng.normal(1, 0.02, size=6)
                ]
                draws.append(bootstrap.ratio_draws(arm, plain, rng, draws=400))
                ratios.append(bootstrap.mean(arm) / bootstrap.mean(plain))
            found = crossover(list(truth), ratios, draws)
            held += found.interval.low <= 12.0 <= found.interval.high
            assert found.batch == pytest.approx(12.0, abs=1.0)
        assert held >= 49

    def test_slow_moments_cancel(self) -> None:
        """Guards the pairing: a machine that is half as fast in one pass widens no ratio."""
        rng = np.random.default_rng(0)
        plain = [[10.0, 10.0], [5.0, 5.0], [8.0, 8.0]]
        arm = [[20.0, 20.0], [10.0, 10.0], [16.0, 16.0]]
        low, high = bootstrap.interval(bootstrap.ratio_draws(arm, plain, rng))
        assert low == high == pytest.approx(2.0)

    def test_words(self) -> None:
        """Guards the JSON: what lies beyond the grid is null, never infinite."""
        never = crossover([1, 8], [1.5, 1.4], [np.array([1.5, 1.5]), np.array([1.4, 1.4])]).as_json()
        assert never == {"batch": None, "interval": [None, None], "verdict": "none up to 8"}
        assert "does not pay" in crossover([1, 8], [0.9, 0.8], [np.array([0.9]), np.array([0.8])]).verdict


class TestSchedule:
    def test_best_gamma_by_batch(self) -> None:
        """Guards the table of `outrider up --schedule`: inclusive ranges without gaps, 0 where nothing pays."""
        found = ranges([1, 8, 16], {1: [1.5, 1.3, 0.9], 4: [2.5, 1.2, 0.6]})
        assert found[0][:2] == (1, 7) and found[0][2] == 4
        assert [entry[2] for entry in found] == [4, 1, 0]
        assert [entry[0] for entry in found[1:]] == [entry[1] + 1 for entry in found[:-1]]
        assert found[-1][1] == 16
        assert ranges([1, 4], {2: [0.9, 0.8]}) == [(1, 4, 0)]


class TestGrid:
    def test_plain_decoding_always_belongs_to_it(self) -> None:
        """Guards ratios against a sweep that forgot what it compares with."""
        assert parse_grid("8,1", "4,auto", "0") == Grid((1, 8), (0, 4, "auto"), (0,))
        for bad in (("", "1", "0"), ("0", "1", "0"), ("1", "-1", "0"), ("1", "x", "0")):
            with pytest.raises(InvalidArgument):
                parse_grid(*bad)

    def test_order_is_random_within_blocks(self) -> None:
        """Guards against an arm that always comes first; arms of one block stay together."""
        grid = Grid((1, 2, 4, 8), (0, 1, 4))
        orders = [grid.order(random.Random(seed)) for seed in range(20)]
        assert all(len({(cell.batch, cell.context) for cell in block}) == 1 for order in orders for block in order)
        assert len({order[0][0].gamma for order in orders}) == 3
        assert len({order[0][0].batch for order in orders}) > 2

    def test_fields(self) -> None:
        """Guards the switch of each request."""
        assert speculation_field(0) == {"speculative": {"enabled": False}}
        assert speculation_field(4) == {"speculative": {"enabled": True, "num_speculative_tokens": 4}}
        assert speculation_field("auto") == {}
        assert parse_prices("target=2.5,draft=0.6") == {"target": 2.5, "draft": 0.6}
        with pytest.raises(InvalidArgument, match="price"):
            parse_prices("gpu=1")


SERIES = """
outrider:step_seconds_count{side="target",stage="total"} 100
outrider:step_seconds_sum{side="target",stage="queue"} 0.1
outrider:step_seconds_sum{side="target",stage="forward"} 2.0
outrider:step_seconds_sum{side="target",stage="sample"} 0.2
outrider:step_seconds_count{side="draft",stage="total"} 100
outrider:step_seconds_sum{side="draft",stage="forward"} 0.5
outrider:gamma_count 400
outrider:spec_decode_num_drafts_total 400
outrider:spec_decode_num_draft_tokens_total 400
"""


class TestSteps:
    def test_parts_of_a_round(self) -> None:
        """Guards the account of a round: means of the services' own times, and a rest that nobody explains."""
        visit = Visit((40.0,) * 4, 4.0, 400, parse(SERIES), ())
        found = steps(CellResult(Cell(4, 1, 0), [visit]))
        assert found is not None
        assert (found.round_ms, found.step_ms, found.draft_ms) == (
            pytest.approx(40),
            pytest.approx(22),
            pytest.approx(5),
        )
        assert (found.streams_per_step, found.rows_per_step) == (4.0, 8.0)
        assert found.parts_ms[REST] == pytest.approx(40 - 1 - 22 - 5)
        assert (found.target_busy, found.draft_busy) == (pytest.approx(0.55), pytest.approx(0.125))

    def test_cost_of_a_step(self) -> None:
        """Guards predictions: interpolated between what was measured, continued beyond it."""
        points = [
            steps(CellResult(Cell(b, 1, 0), [Visit((1.0,), 1.0, 100, parse(text), ())])) for b, text in self.texts()
        ]
        cost = StepCost([point for point in points if point])
        assert [cost(rows) for rows in (1, 16, 24, 64)] == pytest.approx([0.1, 0.1, 0.14, 0.34])

    @staticmethod
    def texts() -> list[tuple[int, str]]:
        law = LinearCost(0.1, 0.005, 16)
        return [
            (
                rows,
                f'outrider:step_seconds_count{{side="target",stage="total"}} 1\n'
                f'outrider:step_seconds_sum{{side="target",stage="forward"}} {float(law(rows))}\n'
                f"outrider:gamma_count {rows}\n",
            )
            for rows in (1, 8, 16, 32, 48)
        ]

    def test_acceptance_given_tested(self) -> None:
        """Guards the step from the share of rounds to the chance of a slot."""
        assert conditional([0.8, 0.64, 0.0]) == pytest.approx((0.8, 0.8, 0.0))


def closed_form() -> list[CellResult]:
    """A sweep whose rates are those of the timed stub pair, tenfold, with a little noise."""
    cost, rng = LinearCost(0.1, 0.005, 16), np.random.default_rng(1)
    report_of = {
        "num_spec_steps": 100,
        "num_draft_tokens": 400,
        "num_accepted_draft_tokens": 236,
        "acceptance_histogram": [20, 16, 13, 10, 41],
    }
    results = []
    for batch in BATCHES:
        for gamma in (0, 1, 4):
            rate = tokens_per_s(batch, gamma, 0.8, cost, 0.01 * gamma) / batch
            answer = stream((0.0, 1), (1.0, 5), (2.0, 9))
            if gamma == 4:
                answer = Outcome(
                    **{name: getattr(answer, name) for name in Outcome.__dataclass_fields__}
                    | {"speculation": report_of}
                )
            visits = [
                Visit(
                    tuple(rng.normal(rate, 0.01 * rate, size=max(batch, 4))),
                    10.0,
                    100,
                    parse(SERIES),
                    (answer,) * batch,
                )
                for _ in range(3)
            ]
            results.append(CellResult(Cell(batch, gamma, 0), visits))
    results.append(CellResult(Cell(64, 0, 0), refusal="http_429: full"))
    return results


def built(analysis: Analysis) -> dict[str, Any]:
    return report.build(
        analysis,
        workload={"dataset": "builtin", "passes": 3},
        services={"target": "T <b>", "draft": "D", "model": "T"},
        environment={"date": "today", "machine": "m", "gpus": [], "outrider": "0", "packages": {"numpy": "2"}},
        prices={"target": 2.5, "draft": 0.6},
        has_draft_device=True,
        notes=["a note"],
    )


class TestReport:
    def test_closed_form_crossovers(self) -> None:
        """Guards the whole analysis: on the stub pair's law gamma 4 crosses between 10 and 12, gamma 1 at 15."""
        found = analyse(closed_form()).crossovers[0]
        assert 10 < found[4].batch < 12 and 14 < found[1].batch < 16
        assert found[4].interval.low < found[4].batch < found[4].interval.high

    def test_schema(self, tmp_path: Path) -> None:
        """Guards what other programs read: `cells`, `crossover` by gamma, and the table of `schedule.json`."""
        found = built(analyse(closed_form()))
        report.write(tmp_path, found)
        again = page.read(tmp_path / "report.json")
        assert again == json.loads(json.dumps(found))
        keys = {
            "batch",
            "gamma",
            "context",
            "output_throughput",
            "ratio_to_plain",
            "ratio_ci",
            "request_throughput",
            "mean_ttft_ms",
            "median_tpot_ms",
            "p99_tpot_ms",
            "p99_itl_ms",
            "mean_e2el_ms",
        }
        assert all(keys <= set(cell) for cell in again["cells"]) and len(again["cells"]) == 24
        assert set(again["crossover"]) == {"1", "4"}
        assert set(again["crossover"]["4"]) == {"batch", "interval", "verdict"}
        assert again["not_measured"] == [{"batch": 64, "gamma": 0, "context": 0, "reason": "http_429: full"}]
        schedule = json.loads((tmp_path / "schedule.json").read_text())
        table = schedule["num_speculative_tokens_per_batch_size"]
        assert read_schedule(tmp_path / "schedule.json", 64)
        assert table[0][0] == 1 and table[-1][1:] == [32, 0] and all(len(entry) == 3 for entry in table)

    def test_the_page_needs_nothing_else(self, tmp_path: Path) -> None:
        """Guards the page: it opens with a verdict, holds its images, and loads nothing; names are escaped."""
        found = built(analyse(closed_form()))
        page.write(tmp_path, found, {"other": found})
        text = (tmp_path / "index.html").read_text()
        assert text.index("Verdict") < text.index("data:image/png;base64")
        assert "Speculation pays most at 1 stream" in text and "T &lt;b&gt;" in text
        assert "http://" not in text and "https://" not in text and "<script" not in text
        assert {
            "ratio.png",
            "ratio_map.png",
            "throughput_latency.png",
            "acceptance.png",
            "round_time.png",
            "cost.png",
        } <= {file.name for file in tmp_path.iterdir()}
        with pytest.raises(InvalidArgument, match="prompts"):
            page.write(tmp_path, found, {"other": found | {"workload": {"dataset": "random"}}})

    def test_speculation_that_does_not_pay_is_said_so(self) -> None:
        """Guards the verdict on a draft that is too slow: both costs are named."""
        results = []
        for gamma in (0, 2):
            rate = tokens_per_s(1, gamma, 0.85, LinearCost(0.03, 0.0), 0.011 + 0.03 * gamma if gamma else 0.0)
            results.append(
                CellResult(
                    Cell(1, gamma, 0), [Visit((rate,) * 4, 4.0, 400, parse(SERIES), (stream((0.0, 1), (1.0, 9)),))]
                )
            )
        first = built(analyse(results))["verdict"][0]
        assert first.startswith("Speculation does not pay here") and "5.0 ms" in first and "22.0 ms" in first

    def test_the_draft_device_is_charged(self) -> None:
        """Guards the price: a rented device costs whether it computes or not; plain decoding needs only one."""
        found = analyse(closed_form()).measured
        plain, arm = found[Cell(8, 0, 0)], found[Cell(8, 4, 0)]
        alone = device_costs(plain, {"target": 3.6}, has_draft_device=True)["cost_per_million_tokens"]
        assert alone == pytest.approx(1e6 * 0.001 / plain.throughput, rel=1e-3)
        both = device_costs(arm, {"target": 3.6, "draft": 1.8}, has_draft_device=True)
        assert both["cost_per_million_tokens"] == pytest.approx(1e6 * 0.0015 / arm.throughput, rel=1e-3)
        assert both["draft_device_s_per_token"] == both["target_device_s_per_token"]


class TestSweep:
    async def test_a_sweep_of_a_scripted_server(self) -> None:
        """Guards the run itself: speculation as asked for, no prompt twice, streams at once, refusals noted."""

        async def script(request: Request) -> None:
            gamma = request.body["speculative"].get("num_speculative_tokens", 0)
            if gamma == 3:
                await request.send(b'data: {"error": {"message": "draft too deep"}}\n\n')
                return
            for index in range(6):
                await request.send(frame("x", 1 + index * (1 + gamma)))
                await asyncio.sleep(0.01)
            await request.send(frame("y", 6 * (1 + gamma), finish_reason="length"), usage(6 * (1 + gamma)), END)

        pool = PromptPool(PromptSet("p", tuple(Prompt(f"q{n}", "t") for n in range(5))), seed=0)
        options = SweepOptions(grid=Grid((1, 4), (0, 1, 3)), passes=2, max_passes=2, output_tokens=6, min_streams=2)
        async with serving(script) as fake:
            endpoint = Endpoint(url=fake.url, door="completions", model="m")
            async with Client(endpoint, connections=4) as client:
                results = await Sweep(client, pool, options).run()
        assert len(set(fake.prompts)) == len(fake.prompts)
        assert all(body["ignore_eos"] and body["stream_options"]["continuous_usage_stats"] for body in fake.bodies)
        assert fake.most_under_way == 4
        by_cell = {result.cell: result for result in results}
        assert [len(visit.rates) for visit in by_cell[Cell(1, 0, 0)].visits] == [2, 2]
        refusal = by_cell[Cell(4, 3, 0)].refusal
        assert refusal is not None and "draft too deep" in refusal
        found = analyse(results)
        assert found.measured[Cell(4, 1, 0)].ratio > 0 and found.measured[Cell(4, 0, 0)].ratio == 1
        assert Cell(4, 3, 0) in found.refused

    async def test_answers_are_lengthened_until_all_decode_at_once(self) -> None:
        """Guards against a grid without results where prompts take long to read, and against arms of unequal length."""
        under_way: list[asyncio.Event] = []

        async def script(request: Request) -> None:
            tokens = request.body["max_tokens"]
            if len(under_way) % 3 == 2:  # of three streams the last begins when another has fifteen tokens, or its end
                under_way.append(asyncio.Event())
                await under_way[-2].wait()
            else:
                under_way.append(asyncio.Event())
            mine = under_way[-1]
            for index in range(1, tokens):
                await request.send(frame("x", index))
                await asyncio.sleep(0.002)
                if index == 15:
                    mine.set()
            await request.send(frame("y", tokens, finish_reason="length"), usage(tokens), END)
            mine.set()

        pool = PromptPool(PromptSet("p", tuple(Prompt(f"q{n}", "t") for n in range(5))), seed=0)
        notes: list[str] = []
        shown: list[Cell] = []

        async def run(output_tokens: int) -> list[CellResult]:
            options = SweepOptions(
                grid=Grid((3,), (0, 1)), passes=1, max_passes=1, output_tokens=output_tokens, min_streams=3
            )
            under_way.clear(), notes.clear(), shown.clear()
            async with serving(script) as fake:
                endpoint = Endpoint(url=fake.url, door="completions", model="m")
                async with Client(endpoint, connections=4) as client:
                    sweep = Sweep(
                        client, pool, options, on_visit=lambda result: shown.append(result.cell), warn=notes.append
                    )
                    return await sweep.run()

        for result in await run(12):
            assert result.refusal is None
            lengths = {outcome.output_tokens for visit in result.visits for outcome in visit.outcomes}
            assert len(result.visits) == 1 and len(lengths) == 1 and lengths <= {24, 48}
        assert len(shown) == 2 and any("answers of 24 tokens" in note for note in notes)
        for result in await run(2):
            assert not result.visits and result.refusal is not None

    async def test_a_server_that_fails_is_said_at_once(self) -> None:
        """Guards against a sweep of failures."""
        pool = PromptPool(PromptSet("p", (Prompt("q", "t"),)), seed=0)
        async with serving(failing(500, "boom")) as fake:
            endpoint = Endpoint(url=fake.url, door="completions", model="m")
            async with Client(endpoint, connections=1) as client:
                with pytest.raises(Exception, match="boom"):
                    await Sweep(client, pool, SweepOptions(grid=Grid((1,), (0, 1)))).run()


def test_outrider_exports_the_series_that_the_sweep_reads() -> None:
    """Guards against a renamed series: the account of a round would silently be missing from every report."""
    counters = Counters()
    registry = CollectorRegistry()
    registry.register(DecodingSeries(counters, 8))
    text = generate_latest(registry).decode()
    for side in ("draft", "target"):
        for observe in counters.on_step:
            observe(side, Timings(queue_ms=1, forward_ms=20, sample_ms=2, total_ms=23))
    counters.gamma[4] += 2
    counters.count_round(3, 4, 3, 2)
    counted = parse(generate_latest(registry).decode()).since(parse(text))
    found = steps(CellResult(Cell(2, 4, 0), [Visit((1.0, 1.0), 1.0, 20, counted, ())]))
    assert found is not None
    assert (found.step_ms, found.draft_ms, found.parts_ms["target queue"]) == pytest.approx((22, 22, 1))
    assert (found.streams_per_step, found.rows_per_step) == (2.0, 6.0)


def test_cores() -> None:
    """Guards the placement of a sweep's services against cores that are not there."""
    usable = sorted(os.sched_getaffinity(0))
    assert parse_cpus("target-cpus", str(usable[0])) == (usable[0],)
    for bad in ("x", "", "9999"):
        with pytest.raises(InvalidArgument, match="target-cpus"):
            parse_cpus("target-cpus", bad)
