"""The `costs` command: what the services measured of themselves, and what the coordinator plans with now."""

from __future__ import annotations

import json
import ssl
from typing import Annotated, Any

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from outrider import api_key
from outrider.console import out
from outrider.costs import CostProfile
from outrider.errors import Unavailable
from outrider.local.stack import running_state
from outrider.rpc.ask_costs import ServiceCosts, ask_costs
from outrider.rpc.credentials import TlsFiles, own_door

_STATES = {
    "cached": "measured at an earlier start",
    "measured": "measured since this start",
    "measuring": "being measured while the service is idle",
    "off": "not measured",
    "": "no model to measure",
}
_SERIES = "outrider:cost_seconds"
_LINK = "outrider:link_seconds"


def costs(
    target: Annotated[str | None, typer.Option(help="HOST:PORT of a target service; unset: the running stack.")] = None,
    draft: Annotated[str | None, typer.Option(help="HOST:PORT of a draft service.")] = None,
    url: Annotated[str | None, typer.Option(help="HTTP address of a coordinator, as http://HOST:PORT.")] = None,
    ssl_ca_certs: Annotated[str | None, typer.Option(help="PEM file with the servers' authority: TLS.")] = None,
    ssl_certfile: Annotated[
        str | None, typer.Option(help="PEM file with the certificate to show, for mutual TLS.")
    ] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="PEM file with its key.")] = None,
    authority: Annotated[str | None, typer.Option(help="Name in the servers' certificate, if not the host's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show what a step of each model costs, and what the coordinator plans with now."""
    tls = TlsFiles(certfile=ssl_certfile, keyfile=ssl_keyfile, ca_certs=ssl_ca_certs)
    door: ssl.SSLContext | bool = tls.client_context() if tls else True
    if target is None and draft is None and url is None:
        state = running_state()
        target, draft, url = state.target, state.draft, state.http
        if state.certfile and state.keyfile:
            door = own_door(state.certfile, state.keyfile)
    addresses = {"target": target, "draft": draft}
    services = [ask_costs(role, at, tls, authority) for role, at in addresses.items() if at is not None]
    now = _now(url, door) if url is not None else {}
    if as_json:
        content = {"services": {service.role: _as_json(service) for service in services}, "now": now}
        print(json.dumps(content))  # noqa: T201 - for programs
        return
    for service in services:
        _show(service)
    if now:
        _show_now(now)


def _now(url: str, door: ssl.SSLContext | bool) -> dict[str, Any]:
    """Milliseconds by side and size, and of the way to the target, from the coordinator's series.

    Raises:
        Unavailable: it does not answer.
    """
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/metrics",
            headers=api_key.headers(api_key.from_environment()),
            timeout=5.0,
            trust_env=False,
            verify=door,
        ).raise_for_status()
    except httpx.HTTPError as error:
        raise Unavailable(f"{url} does not answer: {error}") from None
    found: dict[str, Any] = {"target_ms": {}, "draft_ms": {}}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name == _SERIES and sample.value > 0:
                found[f"{sample.labels['side']}_ms"][sample.labels["size"]] = round(1e3 * sample.value, 3)
            elif sample.name == _LINK:
                found["link_ms"] = round(1e3 * sample.value, 3)
    return found


def _as_json(service: ServiceCosts) -> dict[str, Any]:
    profile = service.profile
    content = {"model": service.model, "device": service.device, "state": service.state}
    return content | (profile.to_json() if profile is not None else {})


def _show(service: ServiceCosts) -> None:
    out.print(f"{service.role}: {service.model} on {service.device}, {_STATES.get(service.state, service.state)}")
    profile = service.profile
    if profile is None:
        return
    fit = profile.fit
    out.print(
        f"  a step takes {1e3 * fit.fixed_s:.2f} ms + {1e3 * fit.row_s:.4f} ms per row + "
        f"{1e6 * fit.context_s:.3f} us per cached token, at least {1e3 * fit.floor_s:.2f} ms "
        f"({len(profile.steps)} shapes in {profile.seconds:.1f} s)"
    )
    for context in sorted({step.context for step in profile.steps}):
        out.print(_table(profile, context))


def _table(profile: CostProfile, context: int) -> Table:
    """Streams down, tokens per stream across; milliseconds in the model + in sampling."""
    steps = {(step.streams, step.tokens): step for step in profile.steps if step.context == context}
    widths = sorted({tokens for _, tokens in steps})
    title = f"milliseconds in the model + sampling, {context} cached tokens per stream"
    table = Table("streams", *(f"{tokens} tokens" for tokens in widths), title=title, box=None)
    for streams in sorted({streams for streams, _ in steps}):
        cells = [
            f"{1e3 * step.forward_s:.2f} + {1e3 * step.sample_s:.2f}" if (step := steps.get((streams, tokens))) else "-"
            for tokens in widths
        ]
        table.add_row(str(streams), *cells)
    return table


def _show_now(now: dict[str, Any]) -> None:
    out.print("the coordinator plans with (milliseconds)")
    for side, what in (("target", "a step of so many rows"), ("draft", "a proposal of so many tokens")):
        costs_ms: dict[str, float] = now[f"{side}_ms"]
        line = ", ".join(f"{size}: {value:.2f}" for size, value in costs_ms.items()) or "nothing seen yet"
        out.print(f"  {side}, {what}: {line}")
    out.print(f"  the way to the target and back: {now.get('link_ms', 0.0):.2f}")
