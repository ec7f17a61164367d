"""This process as a driver on a cluster, for as long as a command takes."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from cluster import names
from outrider.errors import Unavailable

_REACHED_WITHIN_S = 10.0


@contextmanager
def connected(address: str) -> Iterator[None]:
    """This process as a driver on the cluster.

    Raises:
        Unavailable: there is none at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    _check_reachable(address)
    try:
        ray.init(address=address, namespace=names.NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Unavailable(f"no Ray cluster at {address}: {str(error).strip().splitlines()[0]}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray tries for minutes, and logs each attempt."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = named.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_WITHIN_S).close()
    except OSError as error:
        raise Unavailable(f"no Ray cluster at {named}: {error}") from None
