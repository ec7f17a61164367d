"""How the figures look in a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.top.figures import SIDES, Figures
from outrider.top.sample import Sample

_BAR = 24


def frame(title: str, now: Sample, figures: Figures) -> RenderableType:
    """One screen."""
    heading = Text(title, style="bold")
    for side in SIDES:
        part = now.ready.get(side)
        heading.append(f"  {side}: {part['model'] if part else 'none'}", style="dim")
    sides = Table("side", "queue ms", "forward ms", "sample ms", "step ms", "KV in use", box=None)
    for side in SIDES:
        times = [_number(figures.step_ms[side][stage], 2) for stage in ("queue", "forward", "sample", "total")]
        sides.add_row(side, *times, f"{bar(figures.kv_use[side])} {figures.kv_use[side]:6.1%}")
    positions = Table("position", "accepted", box=None)
    for position, rate in enumerate(figures.acceptance_per_position):
        positions.add_row(str(position), f"{bar(rate)} {rate:6.1%}")
    if not figures.acceptance_per_position:
        positions.add_row("-", "nothing was drafted and accepted in this time")
    skipped = ", ".join(f"{reason} {rate:.1f}/s" for reason, rate in figures.skipped_per_s.items()) or "none"
    states = [Text(line, style="yellow") for line in figures.degraded] or [Text("all parts do their work", "green")]
    return Group(
        heading,
        Text(
            f"answers running {figures.running}, waiting {figures.waiting}; {figures.tokens_per_s:.1f} tokens/s; "
            f"gamma {_number(figures.gamma, 2)}; accepted {_percent(figures.acceptance)}; "
            f"tokens per drafted round {_number(figures.mean_acceptance_length, 2)}"
        ),
        sides,
        positions,
        Text(f"decoded plainly: {skipped}"),
        *states,
    )


def bar(share: float) -> str:
    """A share from 0 to 1 as a row of blocks."""
    filled = round(_BAR * min(max(share, 0.0), 1.0))
    return "█" * filled + "·" * (_BAR - filled)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
