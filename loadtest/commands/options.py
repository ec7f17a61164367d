"""Options that the commands share, and checks of what was typed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from loadtest.prompts import PromptSet, load
from outrider.api_key import VARIABLE
from outrider.errors import InvalidArgument, OutriderError

Url = Annotated[str, typer.Option(help="The server's address, with or without /v1.")]
Model = Annotated[str | None, typer.Option(help="Model name in requests; unset: the first that the server lists.")]
Door = Annotated[str, typer.Option(help="chat, completions, or auto: chat where the server can.")]
Key = Annotated[
    str | None,
    typer.Option(envvar=[VARIABLE, "OPENAI_API_KEY"], help="Sent as a bearer token.", show_default=False),
]
DatasetName = Annotated[
    str, typer.Option(help="auto, builtin, jsonl (Spec-Bench's format), sharegpt, text (a prompt per line) or random.")
]
DatasetPath = Annotated[Path | None, typer.Option(help="File with prompts.")]
OutputLen = Annotated[int | None, typer.Option(help="Tokens per answer; unset: the data set's, else 128.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; negative: the server's default.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Answers run to their full length.")]
ExtraBody = Annotated[str | None, typer.Option(help="JSON object with further fields of every request.")]
Rate = Annotated[float | None, typer.Option(help="Requests per second (open loop; inf: all at once).")]
Burstiness = Annotated[float, typer.Option(help="Shape of the gaps: 1 Poisson, below 1 burstier, above 1 more even.")]
Arrival = Annotated[str, typer.Option(help="poisson or constant.")]
Trace = Annotated[Path | None, typer.Option(help="JSON lines with `timestamp` (s): replay these arrivals.")]
Concurrency = Annotated[int | None, typer.Option(help="Requests under way at most; without a rate, a closed loop.")]
Seed = Annotated[int, typer.Option(help="Of arrivals, the order of prompts, and random prompts.")]
AllowRepeat = Annotated[bool, typer.Option("--allow-repeat", help="Send a prompt again as it is.")]
AllowBusy = Annotated[bool, typer.Option("--allow-busy", help="Measure a server that answers others too.")]
ErrorRate = Annotated[float, typer.Option(help="Stop when a larger share of requests fails.")]


def needs_extra() -> None:
    try:
        import aiohttp  # noqa: F401
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise OutriderError(f"load tests need {error.name}: pip install 'outrider[loadtest]'") from None


def only_limits(arguments: list[str]) -> list[str]:
    """Limits may follow `--goodput` one by one, as in vLLM's command; anything else is a mistake."""
    for argument in arguments:
        if ":" not in argument or argument.startswith("-"):
            raise InvalidArgument("arguments", f"{argument!r} is not understood; see --help")
    return arguments


def choice(field: str, value: str, *allowed: str) -> Any:
    if value not in allowed:
        raise InvalidArgument(field, f"must be one of {', '.join(allowed)}, got {value!r}")
    return value


def share(field: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise InvalidArgument(field, f"must be from 0 to 1, got {value:g}")
    return value


def above_zero(field: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InvalidArgument(field, f"must be a number above 0, got {value:g}")


def not_negative(field: str, value: int) -> None:
    if value < 0:
        raise InvalidArgument(field, f"must be 0 or more, got {value}")


def json_object(field: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise InvalidArgument(field, f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(field, "must be a JSON object")
    return value


def prompt_set(name: str, path: Path | None, *, seed: int, random_words: int = 64) -> PromptSet:
    """The prompts that `--dataset-name` and `--dataset-path` name."""
    names = ("auto", "builtin", "jsonl", "sharegpt", "text", "random")
    return load(choice("dataset-name", name, *names), path, random_words=random_words, seed=seed)


def named(field: str, texts: list[str]) -> list[tuple[str, str]]:
    """`NAME=VALUE`, several."""
    pairs = []
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or not separator or not value:
            raise InvalidArgument(field, f"{text!r} is not NAME=VALUE")
        pairs.append((name, value))
    return pairs
