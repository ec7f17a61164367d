"""`outrider up`: a pair on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from outrider.commands.options import Dtype, Speculative, of_stack
from outrider.commands.termination import TerminationInterrupts
from outrider.configuration import stack as stack_config
from outrider.configuration.document import read as read_document
from outrider.configuration.settings import complain
from outrider.console import Downloads, announce, out, say, show_plan
from outrider.local.options import HTTP_PORT, StackOptions
from outrider.local.stack import Stack, make_plan, running
from outrider.rpc.credentials import TlsFiles
from outrider.rpc.options import COORDINATOR_PORT, DRAFT_PORT, TARGET_PORT

_GRACE_S = 10.0


@of_stack
def up(
    context: typer.Context,
    dtype: Dtype = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest stream in tokens; unset: the model's own.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that the API answers to.")] = None,
    host: Annotated[str, typer.Option(help="Address of the API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port of the API.")] = HTTP_PORT,
    grpc_port: Annotated[int, typer.Option(help="Port of the gRPC Generate service.")] = COORDINATOR_PORT,
    draft_port: Annotated[int, typer.Option(help="Port of the draft service (loopback).")] = DRAFT_PORT,
    target_port: Annotated[int, typer.Option(help="Port of the target service (loopback).")] = TARGET_PORT,
    num_speculative_tokens: Speculative = "auto",
    schedule: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="schedule.json of `outrider bench sweep`: drafted tokens by batch size."
        ),
    ] = None,
    profile_seconds: Annotated[
        float | None, typer.Option(help="Seconds that each service measures its steps while idle; unset: 20, 0: none.")
    ] = None,
    load_format: Annotated[
        str, typer.Option(help="dummy: random weights from config.json alone, to measure speed; auto: the weights.")
    ] = "auto",
    rejection_sample_method: Annotated[str, typer.Option(help="auto, standard or coupled.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Revision of the target on the hub.")] = None,
    draft_revision: Annotated[str | None, typer.Option(help="Revision of the draft on the hub.")] = None,
    allow_vocab_mismatch: Annotated[
        bool, typer.Option(help="Draft with another vocabulary, confined to the ids that agree.")
    ] = False,
    allow_planted_errors: Annotated[
        bool, typer.Option("--allow-planted-errors", help="Let requests ask for errors, to test `outrider verify`.")
    ] = False,
    ssl_certfile: Annotated[str | None, typer.Option(help="PEM file: TLS for the API; see `outrider certs`.")] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="PEM file with its key.")] = None,
    ssl_ca_certs: Annotated[
        str | None, typer.Option(help="PEM file with the clients' authority: clients must show a certificate.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Plain text is meant although --host is a network's.")
    ] = False,
    api_key_file: Annotated[
        str | None,
        typer.Option(help="File with the API keys that clients must show; one more may stand in OUTRIDER_API_KEY."),
    ] = None,
) -> None:
    """Serve a pair on this machine; Ctrl-C stops it."""
    options = stack_options(context)
    seats = make_plan(options)
    show_plan(seats)
    with TerminationInterrupts(), Downloads() as downloads:
        try:
            with running(options, seats, downloads, say) as stack:
                announce(stack)
                _serve(stack)
        except KeyboardInterrupt:
            pass
        out.print("stopped")


def stack_options(context: typer.Context, *, quiet: bool = False) -> StackOptions:
    """Defaults, then the file, then the flags that were given; `quiet` says nothing about what `up` overrules.

    Args:
        context: of a command with the options of `Stack`.

    Raises:
        BadConfiguration: lists the file's faults.
    """
    values = dict(context.params)
    config = values.pop("config")
    if config is not None:
        file = stack_config.options(read_document(config))
        complain(file.faults)
        if file.overruled and not quiet:
            out.print(f"`up` places the parts itself and overrules {', '.join(file.overruled)}", soft_wrap=True)
        kept = [name for name in file.options if not _is_given(context, name)]
        values |= {name: file.options[name] for name in kept}
    tls, links = (
        TlsFiles(**{field: values.pop(f"{prefix}{field}", None) for field in ("certfile", "keyfile", "ca_certs")})
        for prefix in ("ssl_", "link_ssl_")
    )
    return StackOptions(**values, tls=tls, links=links, config=config)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _serve(stack: Stack) -> None:
    """Watch the parts until a signal asks to stop; then let the answers under way end."""
    try:
        while True:
            stack.supervisor.watch()
            time.sleep(0.2)
    except KeyboardInterrupt:
        out.print(f"stopping; running answers have {_GRACE_S:g} s to end, a second Ctrl-C stops at once")
        stack.supervisor.stop(_GRACE_S)
