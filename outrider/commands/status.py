"""`outrider status`, `health` and `down`: what runs, how it is, and its end."""

from __future__ import annotations

from typing import Annotated

import httpx
import typer
from rich.table import Table
from rich.text import Text

from outrider.commands.options import Authority, CaCerts, ClientCert, ClientKey
from outrider.console import out
from outrider.errors import Unavailable
from outrider.fetch.cache import cache_root
from outrider.health import TIMEOUT_S, ask
from outrider.local.stack import running_state
from outrider.local.state import state_file, stop
from outrider.rpc.credentials import TlsFiles, own_door

_DOWN_TIMEOUT_S = 30.0


def status() -> None:
    """Say what the running stack is and how its parts are."""
    state = running_state()
    table = Table("part", "process", "address", box=None)
    addresses = {"coordinator": f"{state.http}, gRPC {state.grpc}", "target": state.target, "draft": state.draft or ""}
    for role, pid in state.parts.items():
        table.add_row(role, str(pid), addresses[role])
    out.print(f"serving {state.model} (process {state.pid}, logs in {state.logs})")
    out.print(table)
    try:
        verify = own_door(state.certfile, state.keyfile) if state.certfile and state.keyfile else True
        ready = httpx.get(f"{state.http}/ready", timeout=5.0, trust_env=False, verify=verify)
    except httpx.HTTPError as error:
        raise Unavailable(f"{state.http} does not answer ({error}); see the logs in {state.logs}") from None
    out.print(f"ready: {ready.json()}")
    if ready.status_code != 200:
        raise typer.Exit(1)


def health(
    address: Annotated[str, typer.Argument(help="HOST:PORT of a gRPC server, or the URL of a coordinator's /ready.")],
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = TIMEOUT_S,
    ssl_ca_certs: CaCerts = None,
    ssl_certfile: ClientCert = None,
    ssl_keyfile: ClientKey = None,
    authority: Authority = None,
) -> None:
    """Ask one part whether it serves; exit code 1 if it does not."""
    tls = TlsFiles(certfile=ssl_certfile, keyfile=ssl_keyfile, ca_certs=ssl_ca_certs)
    answer = ask(address, timeout_s, tls, authority)
    out.print(Text(answer.line))
    if not answer.serving:
        raise typer.Exit(1)


def down() -> None:
    """Stop the running stack, and nothing else."""
    out.print("stopped" if stop(state_file(cache_root()), _DOWN_TIMEOUT_S) else "no stack is running")
