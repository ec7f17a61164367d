"""Starting, watching and stopping a gRPC server; the same for every part.

A part creates a `Server`, adds its servicers to `Server.grpc`, starts it (health says NOT_SERVING), loads its model,
calls `set_serving`, and waits in `run_until_signal`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.errors import OutriderError, Unavailable
from outrider.rpc.interceptors import ErrorInterceptor
from outrider.rpc.options import HEALTH_SERVICE, server_options

logger = logging.getLogger(__name__)

Drain = Callable[[float], Awaitable[None]]

_STOP_GRACE_S = 0.5


class PortInUse(Unavailable):
    """The address cannot be bound; names it."""


class Server:
    """A gRPC server with health and reflection."""

    def __init__(self, service: str, *, message_limit: int, credentials: grpc.ServerCredentials | None = None) -> None:
        """
        Args:
            service: full name of the service, for health and reflection.
            message_limit: bytes of the largest message, from `options.message_limit`.
            credentials: for TLS or mutual TLS; None serves plain text.
        """
        self.grpc = grpc.aio.server(interceptors=[ErrorInterceptor()], options=server_options(message_limit))
        self.serving = False
        self._names = (HEALTH_SERVICE, service)
        self._credentials = credentials
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)

    async def start(self, host: str, port: int) -> int:
        """Bind and answer health checks with NOT_SERVING.

        Args:
            host: name or address to listen on.
            port: 0 takes a free one.

        Returns:
            The port.

        Raises:
            PortInUse: another process listens there, or the address is not this machine's.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._credentials is None:
                bound = self.grpc.add_insecure_port(address)
            else:
                bound = self.grpc.add_secure_port(address, self._credentials)
        except RuntimeError:
            bound = 0
        if bound == 0:
            raise PortInUse(f"cannot listen on {address}: port in use, or not an address of this machine")
        await self.set_serving(value=False)
        await self.grpc.start()
        logger.info("listening on %s:%d", host, bound)
        return bound

    async def set_serving(self, *, value: bool) -> None:
        """What health checks say from now on, for the server as a whole and for its service."""
        self.serving = value
        states = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, states.SERVING if value else states.NOT_SERVING)

    async def stop(self, drain: Drain | None = None, grace_s: float = 0.0) -> None:
        """Say NOT_SERVING, let calls finish, end the rest.

        Args:
            drain: ends the part's long-lived calls within the seconds given to it.
            grace_s: seconds for `drain`.
        """
        await self.set_serving(value=False)
        if drain is not None and grace_s > 0:
            await drain(grace_s)
        await self.grpc.stop(_STOP_GRACE_S if grace_s > 0 else None)

    async def run_until_signal(self, drain: Drain, grace_s: float, failed: Awaitable[Any] | None = None) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once.

        Args:
            drain: as in `stop`.
            grace_s: as in `stop`.
            failed: ends (with an exception) when the part cannot go on.
        """
        loop = asyncio.get_running_loop()
        signals = asyncio.Queue[int]()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signals.put_nowait, number)
        first = asyncio.ensure_future(signals.get())
        waiting = [first] if failed is None else [first, asyncio.ensure_future(failed)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if first not in done:
            first.cancel()
            await self.stop()
            for task in done:
                task.result()
            return
        logger.info("%s: draining for up to %g s", signal.Signals(first.result()).name, grace_s)
        stopping = asyncio.ensure_future(self.stop(drain, grace_s))
        again = asyncio.ensure_future(signals.get())
        await asyncio.wait([stopping, again], return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            logger.warning("second signal: stopping at once")
            stopping.cancel()
            await self.stop()
        again.cancel()


def run(main: Coroutine[Any, Any, None]) -> int:
    """Run a part on uvloop; a domain error becomes one line and exit code 1.

    Returns:
        The exit code.
    """
    try:
        import uvloop
    except ImportError:  # not made for this platform
        loop_factory = None
    else:
        loop_factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main)
    except OutriderError as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return 130  # interrupted before it served; afterwards the signal drains
    return 0
