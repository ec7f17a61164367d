"""Ports for servers that start later, in another process."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 10_240, 32_767
"""Below the range from which Linux (32768 to 60999) takes ports for connections and for binds to port 0. A port from
that range is often given away again before the server that it was found for has started: Ray alone takes dozens."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on, and that nobody gets by chance.

    Raises:
        OSError: a hundred ports in a row were taken, or the host is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    failure: OSError | None = None
    for port in random.sample(range(_FIRST, _LAST + 1), 100):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                failure = error
                continue
            return port
    assert failure is not None
    raise failure
