"""The `outrider` command: which subcommands there are."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.text import Text

import outrider
from loadtest.commands import bench_app
from loadtest.commands.evaluate import evaluate_draft
from outrider import deploy
from outrider.certs.command import certs
from outrider.commands.demo import demo
from outrider.commands.generate import generate
from outrider.commands.models import models_app
from outrider.commands.status import down, health, status
from outrider.commands.up import up
from outrider.configuration.command import config_app
from outrider.console import err, out
from outrider.cost_report import costs
from outrider.doctor.command import doctor
from outrider.errors import OutriderError
from outrider.planning.command import plan
from outrider.top.command import top
from outrider.training.command import train_draft
from outrider.verify.command import verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Split speculative decoding: a draft on a cheap device rides ahead of the served model, exactly.",
)
app.command()(demo)
app.command()(up)
app.command()(generate)
app.command()(status)
app.command()(health)
app.command()(top)
app.command()(down)
app.command()(verify)
app.command("deploy", context_settings=deploy.SETTINGS)(deploy.deploy)
app.add_typer(bench_app, name="bench")
app.command()(costs)
app.command()(plan)
app.command()(doctor)
app.command()(train_draft)
app.command("evaluate-draft")(evaluate_draft)
app.command()(certs)
app.add_typer(config_app, name="config")
app.add_typer(models_app, name="models")


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=lambda asked: _version(asked), is_eager=True)] = False,
) -> None:
    """Split speculative decoding: a draft on a cheap device rides ahead of the served model, exactly."""


def main() -> None:
    """Entry point: domain errors become one line and exit code 1."""
    try:
        app()
    except OutriderError as error:
        err.print(Text(f"outrider: {error}", style="red"))
        sys.exit(1)


def _version(asked: bool) -> None:
    if asked:
        out.print(f"outrider {outrider.__version__}")
        raise typer.Exit
