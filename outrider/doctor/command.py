"""`outrider doctor`: the command, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from outrider.commands.options import of_stack
from outrider.commands.up import stack_options
from outrider.console import out
from outrider.doctor.examination import examine
from outrider.doctor.finding import Finding, Level

_STYLE = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


@of_stack
def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Say what stands in a stack's way on this machine, and what to do; exit code 1 on a problem."""
    context.params.pop("as_json")
    findings = examine(stack_options(context, quiet=True))
    if as_json:
        body = {"worst": worst(findings).value, "checks": [finding.as_json() for finding in findings]}
        print(json.dumps(body))  # noqa: T201 - for programs
    else:
        _show(findings)
    if worst(findings) is Level.PROBLEM:
        raise typer.Exit(1)


def worst(findings: Sequence[Finding]) -> Level:
    """The gravest level among them."""
    return max((finding.level for finding in findings), key=list(Level).index, default=Level.OK)


def _show(findings: Sequence[Finding]) -> None:
    table = Table(box=None, show_header=False)
    for finding in findings:
        line = Text(finding.text)
        if finding.remedy:
            line.append(f"; {finding.remedy}", style="bold")
        table.add_row(Text(finding.level.value, style=_STYLE[finding.level]), finding.check, line)
    out.print(table)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    out.print(f"{counts[Level.PROBLEM]} problems, {counts[Level.WARNING]} warnings, {counts[Level.OK]} checks ok")
