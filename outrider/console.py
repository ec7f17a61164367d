"""What the command line shows a person: plans, progress, streams of tokens, comparisons."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from outrider import demo
from outrider.client import Piece
from outrider.fetch.reporter import Plan, Progress, megabytes
from outrider.local.layout import Seat
from outrider.local.stack import Stack

_PIPE_WIDTH = 160
"""Columns assumed where there is no terminal, so that tables in logs are not cut to 80."""

out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class Steps:
    """Numbered headings."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._number = 0

    def __call__(self, what: str) -> None:
        self._number += 1
        out.print(Text(f"[{self._number}/{self._total}] {what}", style="bold"))


class Downloads:
    """Renders what a download reports: its plan, notes, and a bar per task."""

    def __init__(self, console: Console = out) -> None:
        self._out = console
        columns = (TextColumn("  {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Downloads:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tasks:  # stopping a bar that does not run prints an empty line
            self._bar.stop()

    def plan(self, plan: Plan) -> None:
        self._out.print(f"  {plan}")

    def note(self, line: str) -> None:
        self._out.print(f"  {line}")

    def progress(self, progress: Progress) -> None:
        if not self._tasks:
            self._bar.start()
        if progress.task not in self._tasks:
            self._tasks[progress.task] = self._bar.add_task(progress.task, total=progress.total or None)
        task = self._tasks[progress.task]
        self._bar.update(task, completed=progress.done, total=progress.total or None)
        if progress.total and progress.done >= progress.total:
            self._bar.remove_task(self._tasks.pop(progress.task))
            if not self._tasks:
                self._bar.stop()


def say(line: str) -> None:
    out.print(Text(f"  {line}"))


def announce(stack: Stack) -> None:
    state = stack.state
    out.print(f"serving {state.model} at {state.http}/v1 (gRPC {state.grpc}); logs in {state.logs}; Ctrl-C stops")


def show_plan(seats: tuple[Seat, ...]) -> None:
    table = Table("role", "model", "device", "weights", "KV tokens that fit", box=None)
    for seat in seats:
        weights = megabytes(seat.footprint.weights_bytes) if seat.footprint.weights_bytes else "none"
        room = "-" if seat.kv_tokens is None else f"{seat.kv_tokens:,}"
        shared = ", shared with the target" if seat.shared else ""
        table.add_row(seat.role, seat.model, seat.describe() + shared, weights, room)
    out.print(table)


def show_pieces(pieces: Iterable[Piece]) -> None:
    """Tokens that the draft proposed in green, the target's own plain."""
    for piece in pieces:
        out.print(Text(piece.text, style="green" if piece.drafted else ""), end="")
    out.print()


def show_comparison(result: demo.Comparison) -> None:
    metrics = result.speculative.metrics
    out.print(Text("green: proposed by the draft and accepted; plain: the target's own", style="dim"))
    table = Table("", "tokens/s", box=None)
    table.add_row("plain", f"{result.tokens_per_s_plain:.1f}")
    table.add_row("speculative", f"{result.tokens_per_s:.1f}  ({result.speedup:.2f} x)")
    out.print(table)
    out.print(
        f"tokens per round {metrics['mean_acceptance_length']:.2f}, "
        f"accepted {metrics['num_accepted_draft_tokens']} of {metrics['num_draft_tokens']} drafted tokens "
        f"({metrics['draft_acceptance_rate']:.0%})"
    )
    if result.divergence is None:
        out.print("text identical with and without speculation: yes")
        return
    token, gap, noise = result.divergence
    verdict = "a near tie of this device's kernels" if result.divergence.explained else "NOT explained by it"
    out.print(
        Text(
            f"the texts differ from generated token {token} on: the two best logits lie {gap:.2e} apart, passes of "
            f"different shapes {noise:.2e}; {verdict}",
            style="yellow" if result.divergence.explained else "red",
        )
    )
