"""`outrider top`: the command."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections import deque
from typing import Annotated

import httpx
import typer
from rich.live import Live
from rich.text import Text

from outrider import api_key
from outrider.commands.options import CaCerts, ClientCert, ClientKey
from outrider.console import out
from outrider.errors import InvalidArgument, Unavailable
from outrider.local.stack import running_state
from outrider.rpc.credentials import TlsFiles, own_door
from outrider.top.figures import figures
from outrider.top.sample import Sample, take
from outrider.top.view import frame

_TIMEOUT_S = 5.0


def top(
    url: Annotated[str | None, typer.Option(help="Of a coordinator; unset: the running stack's.")] = None,
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds between two looks.")] = 1.0,
    window_s: Annotated[float, typer.Option("--window", help="Rates and means are over so many seconds.")] = 10.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, of two looks one interval apart, and end.")
    ] = False,
    ssl_ca_certs: CaCerts = None,
    ssl_certfile: ClientCert = None,
    ssl_keyfile: ClientKey = None,
) -> None:
    """Watch a coordinator at work: load, acceptance, step times, KV in use, what is degraded; Ctrl-C ends it."""
    for name, value in (("interval", interval_s), ("window", window_s)):
        if not 0 < value < float("inf"):
            raise InvalidArgument(name, f"must be a positive number of seconds, got {value:g}")
    address, verify = _door(url, TlsFiles(certfile=ssl_certfile, keyfile=ssl_keyfile, ca_certs=ssl_ca_certs))
    headers = api_key.headers(api_key.from_environment())
    with httpx.Client(base_url=address, headers=headers, timeout=_TIMEOUT_S, trust_env=False, verify=verify) as client:
        samples = deque([take(client)])
        if once:
            time.sleep(interval_s)
            now = take(client)
            out.print(frame(address, now, figures(samples[0], now)))
            return
        with contextlib.suppress(KeyboardInterrupt):
            _watch(client, address, samples, interval_s, window_s)


def _watch(client: httpx.Client, title: str, samples: deque[Sample], interval_s: float, window_s: float) -> None:
    with Live(Text("looking..."), console=out, auto_refresh=False, screen=out.is_terminal) as live:
        while True:
            time.sleep(interval_s)
            try:
                samples.append(take(client))
            except Unavailable as error:  # it may come back
                live.update(Text(str(error), style="red"), refresh=True)
                continue
            while len(samples) > 2 and samples[-1].at_s - samples[1].at_s >= window_s:
                samples.popleft()
            live.update(frame(title, samples[-1], figures(samples[0], samples[-1])), refresh=True)


def _door(url: str | None, tls: TlsFiles) -> tuple[str, ssl.SSLContext | bool]:
    """Where to ask, and whom to trust."""
    given = bool(tls.certfile or tls.keyfile or tls.ca_certs)
    if url is not None:
        return url.rstrip("/"), tls.client_context() if given else True
    state = running_state()
    return state.http, own_door(state.certfile, state.keyfile) if state.certfile and state.keyfile else True
