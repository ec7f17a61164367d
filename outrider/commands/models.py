"""`outrider models`: what can be loaded, and getting it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from outrider import models
from outrider.console import Downloads, out
from outrider.fetch.reporter import megabytes

models_app = typer.Typer(no_args_is_help=True, help="Models that services can load.")


@models_app.command("list")
def list_models() -> None:
    """The named models, and what is in the hub's cache."""
    table = Table("name", "model", "licence", "weights", "place", box=None)
    for entry in models.list_models():
        place = str(entry.path) if entry.path else "not downloaded"
        table.add_row(entry.name, entry.model_id, entry.licence, megabytes(entry.weight_bytes), place)
    out.print(table)


@models_app.command("pull")
def pull(
    name: Annotated[str, typer.Argument(help="Hub id or a name from `outrider models list`.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
) -> None:
    """Download a model, or a newer revision of it."""
    with Downloads() as downloads:
        found = models.pull(name, revision=revision, reporter=downloads)
    out.print(f"{found.model_id} ({found.licence}) is in {found.path}")
