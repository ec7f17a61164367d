"""What several commands take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

Target = Annotated[str, typer.Option(help="Served model: folder, hub id, a name from `outrider models list`, stub:...")]
Draft = Annotated[str, typer.Option(help="Draft model over the same vocabulary, `mtp`, `ngram`, `suffix`, or `none`.")]
Device = Annotated[str, typer.Option(help="GPU number as in nvidia-smi, several (0,1), a UUID, cpu, or auto.")]
Dtype = Annotated[str, typer.Option(help="Number format: auto, bfloat16, float16, float32 or float64.")]
CaCerts = Annotated[str | None, typer.Option(help="PEM file with the server's authority: TLS.")]
ClientCert = Annotated[str | None, typer.Option(help="PEM file with the certificate to show, for mutual TLS.")]
ClientKey = Annotated[str | None, typer.Option(help="PEM file with its key.")]
Authority = Annotated[str | None, typer.Option(help="Name in the server's certificate, if not the address's host.")]
Speculative = Annotated[str, typer.Option(help="Drafted tokens per round: a number, or auto.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A pair and its places: what `up` starts and `doctor` looks at."""

    config: Annotated[str | None, typer.Option(help="YAML file with settings for all parts; flags win over it.")] = None
    target: Target = "default"
    draft: Draft = "default"
    target_device: Device = "auto"
    draft_device: Device = "auto"


def of_stack(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `Stack` in front of its own; it finds their values in its context."""
    signature = inspect.signature(command, eval_str=True)
    context, *own = signature.parameters.values()
    kinds = get_type_hints(Stack, include_extras=True)
    shared = [
        inspect.Parameter(field.name, context.kind, default=field.default, annotation=kinds[field.name])
        for field in fields(Stack)
    ]
    names = {parameter.name for parameter in own}

    @wraps(command)
    def run(**given: Any) -> None:
        command(given[context.name], **{name: value for name, value in given.items() if name in names})

    every = [context, *shared, *own]
    run.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return run
