"""The plots of a sweep, drawn from its report alone."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from loadtest.plot_style import (
    BLUES,
    INK,
    OTHERS,
    PARTS,
    PLAIN,
    STYLE,
    Report,
    batch_axis,
    batches_at,
    colour,
    fixed_gammas,
    label,
    suffix,
)
from loadtest.tables import acceptance_by_gamma, contexts, curve, gammas, round_parts
from loadtest.tables import tasks as task_rates

Png = bytes


def draw(report: Report, arms: Mapping[str, Report]) -> dict[str, Png]:
    """Every plot that the report has the figures for, by file name."""
    plots: dict[str, Callable[[Report, Mapping[str, Report]], Figure | None]] = {
        "ratio_map": _ratio_map,
        "ratio": _ratio,
        "throughput_latency": _throughput_latency,
        "acceptance": _acceptance,
        "predicted": _predicted,
        "round_time": _round_time,
        "cost": _cost,
    }
    drawn = {}
    with matplotlib.rc_context(STYLE):
        for name, plot in plots.items():
            figure = plot(report, arms) if report["cells"] else None
            if figure is not None:
                buffer = io.BytesIO()
                figure.savefig(buffer, format="png")
                drawn[name] = buffer.getvalue()
                plt.close(figure)
    return drawn


def _ratio_map(report: Report, _: Mapping[str, Report]) -> Figure | None:
    shown = [gamma for gamma in gammas(report) if gamma != 0]
    if not shown:
        return None
    places = contexts(report)
    figure, grid = plt.subplots(
        len(places), 1, figsize=(8, 0.9 + len(places) * (0.8 + 0.42 * len(shown))), squeeze=False
    )
    for axes, context in zip(grid[:, 0], places, strict=True):
        batches = batches_at(report, context)
        values = np.full((len(shown), len(batches)), np.nan)
        for row, gamma in enumerate(shown):
            for cell in curve(report, context, gamma):
                values[row, batches.index(cell["batch"])] = cell["ratio_to_plain"]
        norm = TwoSlopeNorm(1.0, vmin=min(0.5, float(np.nanmin(values))), vmax=max(1.5, float(np.nanmax(values))))
        axes.imshow(values, cmap="RdBu", norm=norm, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                strong = abs(float(norm(value)) - 0.5) > 0.3
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color="white" if strong else INK)
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set_yticks(range(len(shown)), [label(gamma) for gamma in shown])
        axes.grid(visible=False)
        axes.set_xlabel("streams that decode at once")
        axes.set_title(f"throughput over plain decoding{suffix(context)}")
    return figure


def _ratio(report: Report, _: Mapping[str, Report]) -> Figure | None:
    context = contexts(report)[0]
    shown = [gamma for gamma in gammas(report) if gamma != 0]
    if not shown:
        return None
    batches = batches_at(report, context)
    figure, axes = plt.subplots(figsize=(8, 4.2))
    axes.axhline(1.0, color=PLAIN, linewidth=1.2)
    for gamma in shown:
        cells = curve(report, context, gamma)
        at = [cell["batch"] for cell in cells]
        tint = colour(gamma, fixed_gammas(report))
        axes.plot(at, [cell["ratio_to_plain"] for cell in cells], "o-", color=tint, label=label(gamma), markersize=4)
        axes.fill_between(
            at,
            [cell["ratio_ci"][0] for cell in cells],
            [cell["ratio_ci"][1] for cell in cells],
            color=tint,
            alpha=0.18,
            linewidth=0,
        )
    low = axes.get_ylim()[0]
    strip = low - 0.06 * (axes.get_ylim()[1] - low)
    for first, last, gamma in report["schedule"]:
        axes.plot(
            [max(first - 0.5, 0.75), last + 0.5],
            [strip, strip],
            color=colour(gamma, fixed_gammas(report)),
            linewidth=7,
            solid_capstyle="butt",
        )
        middle = (max(first, 0.9) * last) ** 0.5
        axes.text(middle, strip, str(gamma), ha="center", va="center", color="white", fontsize=8, fontweight="bold")
    batch_axis(axes, batches)
    axes.set_ylabel("throughput over plain decoding")
    axes.set_title(f"Ratio against load, 95 % intervals; the bar at the bottom is the best gamma{suffix(context)}")
    axes.legend(loc="upper right")
    return figure


def _throughput_latency(report: Report, arms: Mapping[str, Report]) -> Figure | None:
    context = contexts(report)[0]
    figure, axes = plt.subplots(figsize=(8, 4.2))
    for gamma in gammas(report):
        _arm(axes, curve(report, context, gamma), label(gamma), colour(gamma, fixed_gammas(report)))
    for (name, other), tint in zip(arms.items(), OTHERS * len(arms), strict=False):
        place = contexts(other)[0]
        best = "auto" if "auto" in gammas(other) else max(gammas(other), key=lambda g: g if isinstance(g, int) else -1)
        _arm(axes, curve(other, place, best), f"{name}, {label(best)}", tint)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("p99 time per output token, ms (the batch stands at each point)")
    axes.set_ylabel("tokens per second")
    axes.set_title("Throughput against latency: up and to the left is better")
    axes.legend(loc="lower right")
    return figure


def _arm(axes: Axes, cells: Sequence[Mapping[str, Any]], name: str, tint: str) -> None:
    known = [cell for cell in cells if cell["p99_tpot_ms"] is not None]
    axes.plot(
        [cell["p99_tpot_ms"] for cell in known],
        [cell["output_throughput"] for cell in known],
        "o-",
        color=tint,
        label=name,
        markersize=4,
    )
    for cell in known[:: max(1, len(known) // 4)]:
        axes.annotate(
            str(cell["batch"]),
            (cell["p99_tpot_ms"], cell["output_throughput"]),
            fontsize=8,
            color=tint,
            xytext=(3, 3),
            textcoords="offset points",
        )


def _acceptance(report: Report, _: Mapping[str, Report]) -> Figure | None:
    by_gamma = acceptance_by_gamma(report)
    if not by_gamma:
        return None
    tasks = task_rates(report)
    figure, grid = plt.subplots(1, 2 if len(tasks) > 1 else 1, figsize=(8, 3.6), squeeze=False)
    axes = grid[0, 0]
    for gamma, rates in by_gamma.items():
        axes.plot(
            range(1, len(rates) + 1),
            rates,
            "o-",
            color=colour(gamma, fixed_gammas(report)),
            label=label(gamma),
            markersize=4,
        )
    axes.set_ylim(0, 1.02)
    axes.set_xticks(range(1, 1 + max(len(rates) for rates in by_gamma.values())))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, given that it was looked at")
    axes.set_title("Acceptance by position")
    axes.legend(loc="lower left")
    if len(tasks) > 1:
        axes = grid[0, 1]
        names = sorted(tasks, key=lambda name: tasks[name]["length"])
        axes.barh(names, [tasks[name]["length"] for name in names], color=BLUES[2])
        for row, name in enumerate(names):
            axes.text(tasks[name]["length"], row, f" {tasks[name]['length']:.2f}", va="center", fontsize=9)
        axes.set_xlabel("tokens per round")
        axes.set_title("By task, all drafts together")
        axes.grid(visible=False, axis="y")
    return figure


def _predicted(report: Report, _: Mapping[str, Report]) -> Figure | None:
    if not any(cell["measured_to_predicted"] for cell in report["cells"]):
        return None
    context = contexts(report)[0]
    figure, axes = plt.subplots(figsize=(8, 3.8))
    axes.axhspan(0.95, 1.05, color="#dfe5ea", linewidth=0, label="within 5 %")
    axes.axhline(1.0, color=PLAIN, linewidth=1)
    for gamma in fixed_gammas(report):
        own = [cell for cell in curve(report, context, gamma) if cell["measured_to_predicted"]]
        axes.plot(
            [cell["batch"] for cell in own],
            [cell["measured_to_predicted"] for cell in own],
            "o-",
            color=colour(gamma, fixed_gammas(report)),
            label=label(gamma),
            markersize=4,
        )
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.9), max(high, 1.1))
    batch_axis(axes, batches_at(report, context))
    axes.set_ylabel("measured over predicted")
    axes.set_title(f"Measured over predicted: what is missing is time that no step explains{suffix(context)}")
    axes.legend(loc="upper right")
    return figure


def _round_time(report: Report, _: Mapping[str, Report]) -> Figure | None:
    rows = round_parts(report)
    if not rows:
        return None
    names = list(rows[0][1])
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.24 * len(rows)))
    left = np.zeros(len(rows))
    for name, tint in zip(names, PARTS, strict=True):
        widths = np.array([parts[name] for _, parts in rows])
        axes.barh([row for row, _ in rows], widths, left=left, color=tint, label=name, height=0.72)
        left += widths
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title("Where a round's time goes")
    axes.grid(visible=False, axis="y")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.9 / (1.2 + 0.24 * len(rows))), ncols=4, fontsize=8)
    return figure


def _cost(report: Report, _: Mapping[str, Report]) -> Figure | None:
    context = contexts(report)[0]
    priced = any(cell["cost_per_million_tokens"] is not None for cell in report["cells"])
    figure, grid = plt.subplots(1, 2 if priced else 1, figsize=(8, 3.6), squeeze=False)
    shown: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "device-seconds per token, both sides": lambda cell: float(
            cell["target_device_s_per_token"] + cell["draft_device_s_per_token"]
        )
    }
    if priced:
        shown["cost of a million tokens"] = lambda cell: float(cell["cost_per_million_tokens"])
    for axes, (title, value) in zip(grid[0], shown.items(), strict=True):
        curves: dict[int | str, list[Mapping[str, Any]]] = defaultdict(list)
        for gamma in gammas(report):
            curves[gamma] = curve(report, context, gamma)
        for gamma, cells in curves.items():
            axes.plot(
                [cell["batch"] for cell in cells],
                [value(cell) for cell in cells],
                "o-",
                markersize=4,
                color=colour(gamma, fixed_gammas(report)),
                label=label(gamma),
            )
        batch_axis(axes, batches_at(report, context), 1.3)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(title)
    grid[0, 0].legend(loc="upper right")
    return figure
