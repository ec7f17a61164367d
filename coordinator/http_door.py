"""The HTTP door of a coordinator that has a machine's port to itself: uvicorn on the decoder's own event loop.

Serve's proxy would take every event of every stream from the replica as a pickled message of its own, which costs more
than all that the coordinator does for it (docs/http-api.md has figures). So where there is one replica and nothing to
balance, the replica listens itself, as it does for gRPC. On a cluster the proxies are what finds the replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from outrider.rpc.server import PortInUse

_BACKLOG = 2_048
_KEEP_ALIVE_S = 90
"""Longer than the 60 s after which load balancers and clients drop idle connections, so that they are the first."""
_FAREWELL_S = 5
_FREE_WITHIN_S = 10.0
"""A replica that Serve starts anew may find the port still in the hands of the one that it replaces."""
_RETRY_S = 0.2


class HttpDoor:
    """Takes requests from `open` to `close`."""

    def __init__(self, server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
        self._server = server
        self._serving = serving

    @classmethod
    async def open(cls, app: ASGIApp, host: str, port: int) -> HttpDoor:
        """
        Raises:
            PortInUse: naming the address.
        """
        listening = await _listen(host, port)
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FAREWELL_S,
        )
        server = _Server(config)
        return cls(server, asyncio.create_task(server.serve(sockets=[listening]), name="HTTP door"))

    async def close(self) -> None:
        """Take no more connections, and end those there are when what is being answered has been sent."""
        self._server.should_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)


class _Server(uvicorn.Server):
    """Leaves signals to Ray, whose process this is."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    end_s = asyncio.get_running_loop().time() + _FREE_WITHIN_S
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or asyncio.get_running_loop().time() > end_s:
                raise PortInUse(f"cannot listen on {host}:{port}: {error.strerror}") from None
        await asyncio.sleep(_RETRY_S)
