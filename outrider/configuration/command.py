"""The `config` commands."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from outrider.configuration import parts, stack
from outrider.configuration.document import BadConfiguration, read
from outrider.console import out

config_app = typer.Typer(no_args_is_help=True, help="The configuration file of all parts (docs/configuration.md).")


@config_app.command("check")
def check(file: Annotated[str, typer.Argument(help="YAML file.")]) -> None:
    """List all faults of a file at once; exit code 1 if there are any."""
    document = read(file)
    faults = list(stack.options(document).faults)
    for part in parts.MODULES:
        if document.sections[part]:
            faults += parts.ask(part, ["--config", file]).faults
    if faults := list(dict.fromkeys(faults)):
        raise BadConfiguration(faults)
    out.print(f"{file}: no faults")


@config_app.command(
    "show", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
)
def show(
    context: typer.Context,
    file: Annotated[str | None, typer.Argument(help="YAML file; without one, the defaults.")] = None,
    part: Annotated[str | None, typer.Option(help="Only this part: target, draft or coordinator.")] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")] = False,
) -> None:
    """Print the effective settings with the origin of each; flags behind `--part` count as given to that part."""
    if part is not None and part not in parts.MODULES:
        raise typer.BadParameter(f"must be one of {', '.join(parts.MODULES)}", param_hint="--part")
    if context.args and part is None:
        raise typer.BadParameter(f"whose flag is {context.args[0]}? name the part with --part")
    table = Table("setting", "value", "origin", box=None)
    faults = list[str]()
    for name in [part] if part else parts.MODULES:
        answer = parts.ask(name, [*(["--config", file] if file else []), *context.args])
        faults += [fault for fault in answer.faults if file or ": is required" not in fault]
        for key, (value, origin) in sorted(answer.settings.items()):
            if not changed or origin != "default":
                table.add_row(f"{name}.{key}", Text("unset" if value is None else str(value)), origin)
    out.print(table)
    if faults := list(dict.fromkeys(faults)):
        raise BadConfiguration(faults)
