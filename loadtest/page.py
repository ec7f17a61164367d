"""`index.html`: a sweep as one file that needs nothing else, for whoever pays for the cards."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from loadtest.plots import draw
from loadtest.report import FORMAT
from loadtest.show import number
from loadtest.tables import gammas, tasks
from outrider.errors import InvalidArgument

Report = Mapping[str, Any]
_HERE = Path(__file__).parent


def write(folder: Path, report: Report, arms: Mapping[str, Report]) -> None:
    """The page and its plots, into the folder of the report.

    Args:
        arms: other sweeps by name, to plot beside this one.

    Raises:
        InvalidArgument: another sweep was made with other prompts, so nothing can be compared.
    """
    for name, arm in arms.items():
        own, other = report["workload"]["dataset"], arm["workload"]["dataset"]
        if own != other:
            raise InvalidArgument("also", f"{name} was measured with prompts {other}, this sweep with {own}")
    plots = draw(report, arms)
    for name, png in plots.items():
        (folder / f"{name}.png").write_bytes(png)
    (folder / "index.html").write_text(render(report, plots), "utf-8")


def render(report: Report, plots: Mapping[str, bytes]) -> str:
    """The page's text."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["figure"] = lambda value: number(value, "")
    return environment.get_template("page.html.j2").render(
        report=report,
        css=(_HERE / "page.css").read_text("utf-8"),
        images={name: base64.b64encode(png).decode() for name, png in plots.items()},
        tiles=tiles(report),
        gammas=gammas(report),
        tasks=tasks(report),
        missing=missing(report),
    )


def tiles(report: Report) -> list[tuple[str, str, str]]:
    """The figures to read first: value, what it is, and under which conditions."""
    arms = [cell for cell in report["cells"] if cell["gamma"] != 0]
    if not arms:
        return []
    best = max(arms, key=lambda cell: float(cell["ratio_to_plain"]))
    where = f"gamma {best['gamma']}, batch {best['batch']}"
    found = [(f"{best['ratio_to_plain']:.2f} x", "best ratio to plain decoding", where)]
    found += [
        (entry["verdict"], f"crossover of gamma {gamma}", _interval(entry["interval"]))
        for gamma, entry in report["crossover"].items()
        if entry["batch"] is not None
    ][:2]
    if best["steps"]:
        found.append((f"{best['steps']['draft_busy']:.0%}", "draft device computes", where))
    if best["cost_per_million_tokens"] is not None:
        plain = next(cell for cell in report["cells"] if cell["gamma"] == 0 and cell["batch"] == best["batch"])
        found.append(
            (
                number(best["cost_per_million_tokens"], ""),
                "per million tokens",
                f"plain: {plain['cost_per_million_tokens']}",
            )
        )
    return found


def _interval(ends: Sequence[float | None]) -> str:
    low, high = ends
    return f"95 %: {'below the grid' if low is None else low} to {'beyond the grid' if high is None else high}"


def missing(report: Report) -> list[str]:
    """What the page has no figures for, and why."""
    cells = report["cells"]
    lines = [
        f"Batch {entry['batch']}, gamma {entry['gamma']}, context {entry['context'] or 'as is'}: {entry['reason']}"
        for entry in report["not_measured"]
    ]
    if "auto" not in gammas(report):
        lines.append("The server's own choice of gamma (--gamma auto).")
    if not any(cell["steps"] for cell in cells):
        lines.append("Where a round's time goes, and predictions: the server exports no step times.")
    if not any(cell["cost_per_million_tokens"] is not None for cell in cells):
        lines.append("Prices: none were given (--price target=,draft=).")
    lines.append("Energy, other servers and other cards: not part of this run.")
    return lines


def read_arms(texts: Sequence[str]) -> dict[str, Report]:
    """`NAME=report.json` by name.

    Raises:
        InvalidArgument: not of this form, or no report of a sweep.
    """
    arms: dict[str, Report] = {}
    for text in texts:
        name, _, place = text.partition("=")
        path = Path(place) / "report.json" if Path(place).is_dir() else Path(place)
        try:
            arms[name] = read(path)
        except (OSError, ValueError) as error:
            raise InvalidArgument("also", f"{text!r} is not NAME=report.json: {error}") from None
    return arms


def read(path: Path) -> Report:
    """A report that a sweep wrote.

    Raises:
        OSError, ValueError: there is none, or it has another format.
    """
    found: Report = json.loads(path.read_text("utf-8"))
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no report of format {FORMAT}")
    return found
