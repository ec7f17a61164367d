"""The picture of an evaluation, drawn from its JSON alone: for each draft the prediction, and what was measured."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_COLOURS = ("#14549c", "#d9730d", "#3a9d5d", "#8250c4", "#b5404a", "#8a6d1f")
_PLAIN = "#6b7785"
_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6eaee",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw(results: Sequence[Mapping[str, Any]]) -> bytes:
    """A PNG: settings down; improvement by gamma on the left, acceptance by position on the right.

    Args:
        results: at least one, as in the line of JSON.
    """
    names = [title(one) for one in results[0]["settings"]]
    with matplotlib.rc_context(_STYLE):
        figure, grid = plt.subplots(len(names), 2, figsize=(11, 3.4 * len(names)), squeeze=False)
        for row, name in enumerate(names):
            for colour, result in zip(_COLOURS * len(results), results, strict=False):
                for setting in result["settings"]:
                    if title(setting) == name:
                        _improvement(grid[row, 0], result["draft"], setting, colour)
                        _acceptance(grid[row, 1], result["draft"], setting, colour)
            _dress(grid[row, 0], name, "tokens per second over plain decoding's", "drafted tokens per round (gamma)")
            grid[row, 0].axhline(1.0, color=_PLAIN, linewidth=1)
            _dress(grid[row, 1], name, "accepted, given that all before was", "position in the proposal")
            grid[row, 1].set_ylim(0, 1.05)
        grid[0, 0].legend(title="line: predicted; dot: measured, 95 %", loc="best", fontsize=9)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=140)
        plt.close(figure)
    return buffer.getvalue()


def title(setting: Mapping[str, Any]) -> str:
    """What a row of the picture is called."""
    return f"temperature {setting['temperature']:g}, {setting['rule']}"


def _improvement(axes: Axes, draft: str, setting: Mapping[str, Any], colour: str) -> None:
    predicted = {int(gamma): value for gamma, value in setting["predicted"].items()}
    axes.plot(list(predicted), list(predicted.values()), "-", color=colour, label=draft)
    for gamma, value in setting["measured"].items():
        low, high = setting["measured_intervals"][gamma]
        spread = [[max(value - low, 0.0)], [max(high - value, 0.0)]]
        axes.errorbar([int(gamma)], [value], yerr=spread, fmt="o", color=colour, capsize=3, markersize=5)


def _acceptance(axes: Axes, draft: str, setting: Mapping[str, Any], colour: str) -> None:
    shares = setting["acceptance_per_position"]
    lows, highs = zip(*setting["per_position_intervals"], strict=True)
    positions = range(1, len(shares) + 1)
    axes.plot(positions, shares, "o-", color=colour, markersize=4, label=f"{draft} (alpha {setting['alpha']:.2f})")
    axes.fill_between(positions, lows, highs, color=colour, alpha=0.12, linewidth=0)
    axes.legend(loc="best", fontsize=9)


def _dress(axes: Axes, name: str, ylabel: str, xlabel: str) -> None:
    axes.set_title(name)
    axes.set_ylabel(ylabel)
    axes.set_xlabel(xlabel)
