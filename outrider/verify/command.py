"""The `verify` command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.text import Text

from outrider.api_key import VARIABLE, headers
from outrider.console import Downloads, err, out
from outrider.errors import InvalidArgument, OutriderError
from outrider.local.options import StackOptions
from outrider.local.stack import make_plan, private
from outrider.planted import PLANTS
from outrider.verify import check, stub_pair
from outrider.verify.door import Door
from outrider.verify.report import Outcome, Report

_LEAST_SAMPLES = 100
_GRACE_S = 10.0


def verify(
    url: Annotated[
        str | None, typer.Option(help="Address of a coordinator, e.g. http://127.0.0.1:8000; unset: start a pair.")
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Samples of the law, with and without speculation each.")
    ] = check.SAMPLES,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line and nothing else.")] = False,
    plant: Annotated[
        str | None,
        typer.Option(help=f"Show that an error is caught: {', '.join(PLANTS)}. Needs --allow-planted-errors there."),
    ] = None,
    target: Annotated[str, typer.Option(help="Without --url: the served model.")] = "default",
    draft: Annotated[str, typer.Option(help="Without --url: its draft.")] = "default",
    stub: Annotated[
        bool, typer.Option("--stub", help="Without --url: a pair without weights, in place of --target and --draft.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar=VARIABLE, help="Key that the coordinator asks for.", show_default=False)
    ] = None,
) -> None:
    """Test that a deployed pair writes exactly what its target alone would.

    Exit code 0: passed. 1: failed, or caught the planted error. 2: could not judge (no draft, nothing drafted,
    overloaded).
    """
    try:
        if samples < _LEAST_SAMPLES:
            raise InvalidArgument("samples", f"must be at least {_LEAST_SAMPLES}, got {samples}")
        if plant is not None and plant not in PLANTS:
            raise InvalidArgument("plant", f"must be one of {', '.join(PLANTS)}, got {plant!r}")
        with _door(url, target, draft, stub=stub, planted=plant is not None) as address:
            report = asyncio.run(_check(address, samples, plant, api_key))
    except OutriderError as error:
        err.print(Text(f"outrider: could not judge: {error}", style="red"))
        if as_json:
            print(json.dumps({"passed": None, "error": str(error)}))  # noqa: T201 - for programs
        raise typer.Exit(Outcome.COULD_NOT_JUDGE) from None
    _show(report, plant, as_json=as_json)
    raise typer.Exit(report.outcome)


async def _check(url: str, samples: int, plant: str | None, api_key: str | None) -> Report:
    async with httpx.AsyncClient(base_url=url, headers=headers(api_key), trust_env=False) as http:
        return await check.verify(Door(http, planted=plant), samples=samples, say=_say)


@contextlib.contextmanager
def _door(url: str | None, target: str, draft: str, *, stub: bool, planted: bool) -> Iterator[str]:
    """The address of the pair, which is started where none is named.

    A planted error wants a draft that is rejected now and then and has a q at all, so by default it gets the stub pair.
    """
    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    with tempfile.TemporaryDirectory(prefix="outrider-verify-") as folder, Downloads(err) as downloads:
        if stub or (planted and target == draft == "default"):
            target, draft = stub_pair.write(Path(folder))
        options = StackOptions(
            target=target,
            draft=draft,
            allow_planted_errors=planted,
        )
        with private(options, make_plan(options), downloads, _say) as stack:
            yield stack.state.http
            stack.supervisor.stop(_GRACE_S)


def _show(report: Report, plant: str | None, *, as_json: bool) -> None:
    if as_json:
        print(report.to_json())  # noqa: T201 - for programs, free of any styling
        return
    for line in report.lines():
        out.print(Text(line))
    verdicts = {
        Outcome.PASSED: "passed",
        Outcome.FAILED: "FAILED: the pair does not write what its target alone would",
        Outcome.COULD_NOT_JUDGE: f"could not judge: {report.why_not_judged}",
    }
    if plant is not None:
        verdicts[Outcome.PASSED] = f"the planted error {plant} was NOT caught"
        verdicts[Outcome.FAILED] = f"the planted error {plant} was caught"
    out.print(Text(verdicts[report.outcome], style="bold"))


def _say(line: str) -> None:
    err.print(Text(f"  {line}"))
