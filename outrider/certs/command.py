"""The `certs` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.console import out


def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for the PEM files; an authority in it is kept.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address under which clients reach the API; may be repeated.")
    ] = None,
    days: Annotated[int, typer.Option(help="Days for which the certificates are valid.")] = 90,
) -> None:
    """Make an authority and certificates for draft, target, coordinator and health probes, or renew the certificates.

    For development and private networks. Running parts take up renewed certificates by themselves.
    """
    from outrider.certs.issue import issue  # cryptography takes a while to import

    for path in issue(folder, host or (), days):
        out.print(f"{path}")
    out.print(f"draft, target: --ssl-certfile {folder}/PART.pem --ssl-keyfile {folder}/PART.key", soft_wrap=True)
    out.print(f"               --ssl-ca-certs {folder}/ca.pem (mutual TLS)", soft_wrap=True)
    out.print(f"coordinator:   the same for its doors, and --link-ssl-ca-certs {folder}/ca.pem", soft_wrap=True)
    out.print(
        f"               --link-ssl-certfile {folder}/coordinator.pem --link-ssl-keyfile {folder}/coordinator.key",
        soft_wrap=True,
    )
