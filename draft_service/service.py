"""The draft service as a whole: server, links and backend, from start to drain. Used by `__main__` and by Ray alike."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from draft_service.config import DraftConfig
from draft_service.servicer import Backend, DraftServicer
from outrider.rpc.credentials import server_credentials
from outrider.rpc.info import new_instance_id
from outrider.rpc.options import DRAFT_SERVICE_NAME, LEASE_S, message_limit
from outrider.rpc.server import Server

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 1.0


class DraftService:
    """One draft service in this process.

    Args:
        config: of the service.
        lease_s: how long a lost link's streams are kept.
    """

    def __init__(self, config: DraftConfig, lease_s: float = LEASE_S) -> None:
        self.config = config
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._backend = self._make_backend(lease_s)
        self._server = Server(
            DRAFT_SERVICE_NAME,
            message_limit=message_limit(
                max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len, max_slots=config.max_slots
            ),
            credentials=server_credentials(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs),
        )
        self._servicer = DraftServicer(
            self._backend,
            instance_id=new_instance_id(),
            max_num_seqs=config.max_num_seqs,
            max_slots=config.max_slots,
            lease_s=lease_s,
        )
        self._servicer.register(self._server)
        self._watch: asyncio.Task[None] | None = None

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
        await self._server.run_until_signal(self._servicer.links.drain, self.config.drain_s, self._failed)
        await self.close()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Drain for up to `grace_s` seconds, then end everything."""
        await self._server.stop(self._servicer.links.drain, grace_s)
        await self.close()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._backend.ready.done():  # a thread that is still loading ends with the process
            await asyncio.to_thread(self._backend.close)

    async def _keep_watch(self) -> None:
        """Health follows the engine: a step that hangs makes the service NOT_SERVING until it ends."""
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            self._backend.tick()
            stuck = self._backend.is_stuck
            if stuck == self._server.serving and not self._servicer.links.draining:
                logger.warning("the engine %s", "hangs" if stuck else "is back")
                await self._server.set_serving(value=not stuck)

    def _make_backend(self, lease_s: float) -> Backend:
        if self.config.is_ngram:
            from draft_service.ngram_backend import NgramBackend

            return NgramBackend(self.config, lease_s)
        # Here and not above: prompt lookup starts in a fraction of the time that importing torch takes.
        from draft_service.eagle3_backend import Eagle3Backend
        from draft_service.model_backend import ModelBackend
        from outrider.engine.eagle3_loader import is_head
        from outrider.engine.stub import is_stub

        if not is_stub(self.config.model) and is_head(Path(self.config.model)):
            return Eagle3Backend(self.config, self._on_fatal, lease_s)
        return ModelBackend(self.config, self._on_fatal, lease_s)

    def _on_fatal(self, error: BaseException) -> None:
        """Called in the engine thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
