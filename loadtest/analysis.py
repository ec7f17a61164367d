"""From visits to figures: ratios with intervals, crossovers, predictions, costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest import bootstrap
from loadtest.bootstrap import F64, Interval
from loadtest.cells import Cell, CellResult, Gamma
from loadtest.crossover import Crossover, crossover
from loadtest.loop import Run
from loadtest.schedule import Range, ranges
from loadtest.steps import StepCost, Steps, steps
from loadtest.summary import acceptance, latencies, summarise
from outrider.economics import expected_tokens

_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell's figures.

    Attributes:
        throughput: tokens per second of all streams, while all of them decode.
        ratio, ratio_ci: to plain decoding at the same batch and context.
        acceptance: [gamma] chance of a slot to be accepted, given that those before it were; empty without drafts.
        predicted: tokens per second from measured acceptance and step costs, all streams in one step and nothing else
            taking time.
    """

    cell: Cell
    throughput: float
    ratio: float
    ratio_ci: Interval
    steps: Steps | None
    acceptance: tuple[float, ...]
    predicted: float | None
    figures: Mapping[str, Any]
    by_task: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Analysis:
    """All of a sweep.

    Attributes:
        crossovers: by context, then by gamma.
        schedule: the best gamma by batch, at the first context.
        refused: cells without figures, with the reason.
    """

    measured: Mapping[Cell, Measured]
    crossovers: Mapping[int, Mapping[Gamma, Crossover]]
    schedule: Sequence[Range]
    refused: Mapping[Cell, str]

    def at(self, context: int, gamma: Gamma) -> list[Measured]:
        """Cells of one curve, by batch."""
        found = [one for cell, one in self.measured.items() if (cell.context, cell.gamma) == (context, gamma)]
        return sorted(found, key=lambda one: one.cell.batch)

    @property
    def contexts(self) -> list[int]:
        return sorted({cell.context for cell in self.measured})

    @property
    def gammas(self) -> list[Gamma]:
        """Fixed ones ascending, then "auto"."""
        found = {cell.gamma for cell in self.measured}
        return sorted(found, key=lambda gamma: (gamma == "auto", 0 if gamma == "auto" else gamma))


def analyse(results: Sequence[CellResult], *, seed: int = 0) -> Analysis:
    """Figures of a sweep."""
    rng = np.random.default_rng(seed)
    by_cell = {result.cell: result for result in results}
    stepped = {result.cell: steps(result) for result in results if result.visits}
    known = [step for step in stepped.values() if step is not None]
    cost = StepCost(known) if known else None
    draws: dict[Cell, F64] = {}
    measured: dict[Cell, Measured] = {}
    refused: dict[Cell, str] = {}
    for result in results:
        cell = result.cell
        plain = by_cell[cell._replace(gamma=0)]
        if not result.visits or not plain.visits:
            refused[cell] = result.refusal or f"plain decoding was not measured: {plain.refusal}"
            continue
        draws[cell] = (
            np.ones(bootstrap.DRAWS) if cell.gamma == 0 else bootstrap.ratio_draws(result.rates, plain.rates, rng)
        )
        measured[cell] = _measure(result, plain, draws[cell], stepped[cell], cost)
    return Analysis(measured, _crossovers(measured, draws), _schedule(measured), refused)


def _measure(result: CellResult, plain: CellResult, draws: F64, step: Steps | None, cost: StepCost | None) -> Measured:
    outcomes = [outcome for visit in result.visits for outcome in visit.outcomes]
    seconds = sum(visit.seconds for visit in result.visits)
    figures = summarise(Run(outcomes, sum(visit.total_s for visit in result.visits)), planned=len(outcomes))
    throughput = result.cell.batch * bootstrap.mean(result.rates)
    visits = min(len(result.visits), len(plain.visits))
    ratio = bootstrap.mean(result.rates[:visits]) / bootstrap.mean(plain.rates[:visits])
    tpot = latencies("tpot", [1 / rate for visit in result.rates for rate in visit if rate > 0])
    rates = conditional(figures.get("spec_decode_per_position_acceptance_rates") or [])
    by_task = defaultdict(list)
    for outcome in outcomes:
        by_task[outcome.task].append(outcome)
    return Measured(
        cell=result.cell,
        throughput=throughput,
        ratio=ratio,
        ratio_ci=bootstrap.interval(draws) if result.cell.gamma != 0 else Interval(1.0, 1.0),
        steps=step,
        acceptance=rates,
        predicted=_predict(result.cell, rates, step, cost),
        figures=figures | tpot | {"output_throughput": round(throughput, 4), "window_s": round(seconds, 3)},
        by_task={task: acceptance(own) for task, own in sorted(by_task.items()) if acceptance(own)},
    )


def conditional(unconditional: Sequence[float]) -> tuple[float, ...]:
    """From the share of rounds that reached a slot to the chance of a slot given the one before it."""
    before, rates = 1.0, []
    for rate in unconditional:
        if before <= 0:
            break
        rates.append(min(1.0, rate / before))
        before = rate
    return tuple(rates)


def _predict(cell: Cell, rates: Sequence[float], step: Steps | None, cost: StepCost | None) -> float | None:
    """B E(gamma) / (T(B (gamma + 1)) + draft); of `auto` nothing is predicted, its gamma changes."""
    if step is None or cost is None or not isinstance(cell.gamma, int):
        return None
    if cell.gamma == 0:
        return cell.batch / cost(cell.batch)
    if not rates:
        return None
    tokens = expected_tokens(rates[: cell.gamma])
    return cell.batch * tokens / (cost(cell.batch * (cell.gamma + 1)) + step.draft_ms / 1000)


def _crossovers(measured: Mapping[Cell, Measured], draws: Mapping[Cell, F64]) -> dict[int, dict[Gamma, Crossover]]:
    curves: dict[tuple[int, Gamma], list[Cell]] = defaultdict(list)
    for cell in measured:
        if cell.gamma != 0:
            curves[cell.context, cell.gamma].append(cell)
    found: dict[int, dict[Gamma, Crossover]] = defaultdict(dict)
    for (context, gamma), cells in curves.items():
        cells.sort()
        batches = [cell.batch for cell in cells]
        ratios = [measured[cell].ratio for cell in cells]
        found[context][gamma] = crossover(batches, ratios, [draws[cell] for cell in cells])
    return dict(found)


def _schedule(measured: Mapping[Cell, Measured]) -> list[Range]:
    context = min((cell.context for cell in measured), default=0)
    here = [one for cell, one in measured.items() if cell.context == context and isinstance(cell.gamma, int)]
    gammas = sorted({one.cell.gamma for one in here if isinstance(one.cell.gamma, int)})
    batches = [
        batch
        for batch in sorted({one.cell.batch for one in here})
        if all(Cell(batch, gamma, context) in measured for gamma in gammas)
    ]
    if not batches:
        return []
    ratios = {gamma: [measured[Cell(batch, gamma, context)].ratio for batch in batches] for gamma in gammas}
    return ranges(batches, ratios)


def device_costs(one: Measured, prices: Mapping[str, float], *, has_draft_device: bool) -> dict[str, float | None]:
    """Seconds of each device per token, and the price of a million tokens.

    A device is paid for whether it computes or not. Plain decoding needs no draft device and is not charged for one.
    """
    pays_draft = has_draft_device and one.cell.gamma != 0
    target_s = 1 / one.throughput
    draft_s = target_s if pays_draft else 0.0
    price = None
    if "target" in prices:
        per_hour = prices["target"] + (prices.get("draft", 0.0) if pays_draft else 0.0)
        price = round(1e6 * per_hour / _SECONDS_PER_HOUR / one.throughput, 4)
    return {
        "target_device_s_per_token": round(target_s, 6),
        "draft_device_s_per_token": round(draft_s, 6),
        "cost_per_million_tokens": price,
    }
