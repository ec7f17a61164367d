"""Plain text stays on this machine: off loopback a part wants TLS, or the operator's word that it is not needed."""

from __future__ import annotations

import ipaddress

from outrider.errors import InvalidArgument


def is_loopback(host: str) -> bool:
    """Whether packets to or for this host never leave the machine."""
    name = host.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_of(address: str) -> str:
    """The host of HOST:PORT."""
    return address.rpartition(":")[0] or address


def guard(field: str, host: str, *, encrypted: bool, insecure: bool, remedy: str) -> None:
    """
    Args:
        field: the setting that names `host`.
        encrypted: whether TLS is on.
        insecure: whether plain text is meant.
        remedy: the settings that turn TLS on.

    Raises:
        InvalidArgument: prompts and answers would cross a network in plain text.
    """
    if encrypted or insecure or is_loopback(host):
        return
    raise InvalidArgument(
        field,
        f"{host} is not loopback, and prompts and answers would cross the network in plain text; give {remedy} "
        "(`outrider certs DIR` makes certificates to begin with), or `insecure` on a network that you trust",
    )
