"""How the plots of a sweep look: colours, labels and axes that mean the same in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from loadtest.tables import gammas

Report = Mapping[str, Any]

INK = "#1d2733"
PLAIN = "#6b7785"
_AUTO = "#d9730d"
BLUES = ("#9ecae1", "#5aa5d6", "#2b7bba", "#14549c", "#0a3672", "#061f45")
OTHERS = ("#3a9d5d", "#8250c4", "#b5404a", "#8a6d1f")
PARTS = ("#dbe7f3", "#7fb2de", "#b9d4ee", "#f5dcc0", "#d9730d", "#edb987", "#9aa5b1")
STYLE: Any = {
    "font.size": 10,
    "axes.edgecolor": "#c4ccd4",
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6eaee",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "savefig.dpi": 160,
    "figure.constrained_layout.use": True,
}


def colour(gamma: int | str, fixed: Sequence[int]) -> str:
    """Grey for plain decoding, orange for the server's own choice, darker blue for more drafted tokens."""
    if gamma == "auto":
        return _AUTO
    if gamma == 0:
        return PLAIN
    rank = sorted(value for value in fixed if value).index(int(gamma))
    return BLUES[min(len(BLUES) - 1, 1 + rank)]


def label(gamma: int | str) -> str:
    """Of a curve."""
    return "plain" if gamma == 0 else "automatic" if gamma == "auto" else f"gamma {gamma}"


def fixed_gammas(report: Report) -> list[int]:
    """Those of a report, without the server's own choice."""
    return [gamma for gamma in gammas(report) if isinstance(gamma, int)]


def batch_axis(axes: Axes, batches: Sequence[int], closest: float = 1.1) -> None:
    """Powers of two; labels closer than this factor to the one before are left out."""
    axes.set_xscale("log", base=2)
    shown: list[int] = []
    for batch in batches:
        if not shown or batch >= closest * shown[-1]:
            shown.append(batch)
    axes.set_xticks(shown, [str(batch) for batch in shown])
    axes.minorticks_off()
    axes.set_xlabel("streams that decode at once")


def batches_at(report: Report, context: int) -> list[int]:
    """Batch sizes measured at a context, rising."""
    return sorted({cell["batch"] for cell in report["cells"] if cell["context"] == context})


def suffix(context: int) -> str:
    """What a title says of the context; nothing for prompts of all lengths."""
    return f", context {context}" if context else ""
