"""What the load tests show a person: bars, tables, and the one line for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from loadtest import bootstrap
from loadtest.cells import CellResult
from loadtest.outcome import Outcome
from outrider.console import err, out


def bar() -> Progress:
    """A progress bar on standard error, so that standard output stays clean."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=err, transient=True)


class Requests:
    """A bar over the requests of a run."""

    def __init__(self, total: int) -> None:
        self._bar = bar()
        self._task = self._bar.add_task("requests", total=total)
        self._failed = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def count(self, outcome: Outcome) -> None:
        self._failed += outcome.failure is not None
        description = f"requests, {self._failed} failed" if self._failed else "requests"
        self._bar.update(self._task, advance=1, description=description)


class Cells:
    """A bar over the visits of a sweep."""

    def __init__(self, total: int) -> None:
        self._bar = bar()
        self._total = total
        self._done = 0
        self._task = self._bar.add_task("sweep", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def visited(self, result: CellResult) -> None:
        self._done += 1
        self._total = max(self._total, self._done)
        rate = f", {bootstrap.mean(result.rates) * result.cell.batch:.1f} tokens/s" if result.visits else ", no result"
        self._bar.update(self._task, completed=self._done, total=self._total, description=f"{result.cell}{rate}")
        if not err.is_terminal:
            err.print(f"{self._done}/{self._total} {result.cell}{rate}")


def warn(line: str) -> None:
    err.print(Text(f"note: {line}", style="yellow"))


def figures(result: Mapping[str, Any]) -> None:
    """The table of one run."""
    table = Table("", "", box=None, show_header=False)
    rows = (
        ("completed", f"{result['completed']} of {result['num_prompts']}"),
        ("failed", ", ".join(f"{name} {count}" for name, count in result["failures"].items()) or "none"),
        ("duration", number(result["duration"], "s")),
        ("requests", number(result["request_throughput"], "1/s")),
        ("requests within limits", number(result.get("request_goodput"), "1/s")),
        ("output tokens", number(result["output_throughput"], "1/s")),
        ("tokens per round", number(result.get("spec_decode_acceptance_length"), "")),
        ("drafted tokens accepted", number(result.get("spec_decode_acceptance_rate"), "")),
    )
    for name, value in rows:
        if value != "n/a":
            table.add_row(name, value)
    out.print(table)
    table = Table("ms", "mean", "median", "p99", box=None)
    for name in ("ttft", "tpot", "itl", "e2el"):
        table.add_row(name.upper(), *(number(result[f"{kind}_{name}_ms"], "") for kind in ("mean", "median", "p99")))
    out.print(table)


def number(value: float | None, unit: str) -> str:
    """Three or more digits, or n/a."""
    if value is None:
        return "n/a"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f} {unit}".strip()


def last_line(result: Mapping[str, Any]) -> None:
    """One JSON object, free of styling."""
    print(json.dumps(result, allow_nan=False))  # noqa: T201 - for programs


def sweep(report: Mapping[str, Any]) -> None:
    """The cells of a sweep, and what they mean."""
    table = Table("context", "batch", "gamma", "tokens/s", "of plain", "95 %", "p99 TPOT ms", "of predicted", box=None)
    for cell in report["cells"]:
        low, high = cell["ratio_ci"]
        table.add_row(
            str(cell["context"] or "-"),
            str(cell["batch"]),
            str(cell["gamma"]),
            number(cell["output_throughput"], ""),
            f"{cell['ratio_to_plain']:.3f}",
            f"{low:.3f} to {high:.3f}" if cell["gamma"] != 0 else "",
            number(cell["p99_tpot_ms"], ""),
            number(cell["measured_to_predicted"], ""),
        )
    out.print(table)
    for entry in report["not_measured"]:
        out.print(f"not measured: batch {entry['batch']}, gamma {entry['gamma']}: {entry['reason']}")
    for line in report["verdict"]:
        out.print(line)


def comparison(result: Mapping[str, Any]) -> None:
    """Arms side by side; a refusal stands in its arm's line."""
    table = Table("arm", "tokens/s", "of baseline", "95 %", "TTFT ms", "TPOT ms", "p99 TPOT ms", "failed", box=None)
    for name, arm in result["arms"].items():
        if "refused" in arm:
            table.add_row(name, "refused")
            continue
        ratio = "1" if name == result["baseline"] else number(arm.get("ratio_to_baseline"), "")
        interval = " to ".join(f"{end:.3f}" for end in arm["ratio_ci"]) if "ratio_ci" in arm else ""
        times = (number(arm[key], "") for key in ("median_ttft_ms", "median_tpot_ms", "p99_tpot_ms"))
        table.add_row(name, number(arm["output_throughput"], ""), ratio, interval, *times, str(arm["failed"]))
    out.print(table)
    for name, arm in result["arms"].items():
        if "refused" in arm:
            out.print(f"{name} refused: {arm['refused']}")
    if not result["same_output_lengths"]:
        out.print("the arms wrote answers of different lengths, so their work differs; leave --stop-at-eos out")
