"""`outrider bench page`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadtest.commands.options import needs_extra
from outrider.errors import InvalidArgument


def bench_page(
    folder: Annotated[Path, typer.Argument(help="Folder of a sweep, with its report.json.")],
    also: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER of another sweep, to plot beside.")] = None,
) -> None:
    """Draw a sweep's plots and page again, with other sweeps beside it."""
    needs_extra()
    from loadtest import page
    from outrider.console import out

    try:
        report = page.read(folder / "report.json")
    except (OSError, ValueError) as error:
        raise InvalidArgument("folder", str(error)) from None
    page.write(folder, report, page.read_arms(also or []))
    out.print(str(folder / "index.html"))
