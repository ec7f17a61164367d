"""A service's life: listen, load, serve, watch its engine, drain. Used by the launcher and by Ray alike."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import Any, Protocol

from outrider import tracing
from outrider.rpc.credentials import server_credentials
from outrider.rpc.link import LinkHost
from outrider.rpc.options import message_limit
from outrider.rpc.server import Server
from outrider.service.config import ServiceConfig

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 1.0


class Backend(Protocol):
    """What computes behind a service."""

    @property
    def ready(self) -> Future[None]:
        """Resolves when it can serve, or holds the reason why it cannot."""

    @property
    def is_stuck(self) -> bool:
        """Whether a step hangs."""

    def start(self) -> None:
        """Begins to load."""

    def tick(self) -> None:
        """Called about once a second."""

    def close(self) -> None:
        """Ends it; blocks until it has ended."""


class Servicer(Protocol):
    """What answers a service's calls."""

    @property
    def links(self) -> LinkHost[Any, Any]:
        """Its links, to drain them."""

    def register(self, server: Server) -> None:
        """Adds itself to the server."""


class Service:
    """One service in this process: a subclass makes the backend and the servicer and hands them to `host`."""

    def __init__(self, config: ServiceConfig, name: str) -> None:
        """`name` is the full name of the gRPC service.

        Raises:
            InvalidArgument: a certificate cannot be used.
        """
        self.config = config
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._server = Server(
            name,
            message_limit=message_limit(
                max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len, max_slots=config.max_slots
            ),
            credentials=server_credentials(config.tls),
        )
        self._watch: asyncio.Task[None] | None = None
        part = name.rpartition(".")[2].removesuffix("Service").lower()
        self._tracer = tracing.tracer(part, tracing.endpoint(config.otlp_endpoint))

    def host(self, backend: Backend, servicer: Servicer) -> None:
        """Serve these two; called once, before `start`."""
        self._backend = backend
        self._servicer = servicer
        servicer.links.tracer = self._tracer
        servicer.register(self._server)

    async def start(self) -> int:
        """Listen (health: NOT_SERVING) and begin to load.

        Returns:
            The port.

        Raises:
            PortInUse: naming the address.
        """
        port = await self._server.start(self.config.host, self.config.port)
        self._backend.start()
        return port

    async def ready(self) -> None:
        """Wait until the model is loaded, then serve (health: SERVING).

        Raises:
            OutriderError: the model cannot be served; says why.
        """
        await asyncio.wrap_future(self._backend.ready)
        await self._server.set_serving(value=True)
        self._watch = asyncio.create_task(self._keep_watch())
        logger.info("serving %s", self.config.model)

    async def run(self) -> None:
        """Serve until a signal, then drain.

        Raises:
            BaseException: what stopped the engine.
        """
        await self._server.run_until_signal(self._servicer.links.drain, self.config.drain_seconds, self._failed)
        await self.close()

    async def failure(self) -> None:
        """Wait for what stops the engine; for hosts that own the signals themselves.

        Raises:
            BaseException: what stopped it.
        """
        await asyncio.shield(self._failed)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Drain for up to `grace_s` seconds, then end everything."""
        await self._server.stop(self._servicer.links.drain, grace_s)
        await self.close()

    async def close(self) -> None:
        """End the watch and the backend."""
        if self._watch is not None:
            self._watch.cancel()
        if self._backend.ready.done():  # a thread that is still loading ends with the process
            await asyncio.to_thread(self._backend.close)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def on_fatal(self, error: BaseException) -> None:
        """The engine stopped for good; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    async def _keep_watch(self) -> None:
        """Health follows the engine: while a step hangs the service is NOT_SERVING and takes no links."""
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            self._backend.tick()
            stuck = self._backend.is_stuck
            if stuck == self._server.serving and not self._servicer.links.draining:
                logger.warning("the engine %s", "hangs" if stuck else "is back")
                await self._server.set_serving(value=not stuck)
                if stuck:
                    self._servicer.links.refuse("the engine hangs")
                else:
                    self._servicer.links.resume()

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
