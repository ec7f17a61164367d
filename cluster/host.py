"""The actor that hosts one service: the same class that the process runs, on Ray's event loop."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from typing import NamedTuple

import ray

from draft_service.config import DraftConfig
from outrider.errors import OutriderError
from outrider.models import Role
from outrider.service.environment import set_environment
from outrider.service.launch import located
from outrider.service.service import Service
from target_service.config import TargetConfig

logger = logging.getLogger(__name__)

_SHOWN_S = 15.0
"""How long an actor that cannot serve stays to say why, before Ray starts it anew."""

STARTING, LOADING, SERVING, FAILED = "starting", "loading", "serving", "failed"
AWAY, DEAD = "away", "dead"
"""What a service says of itself, and what is said of one that does not answer: Ray starts it anew, or never will."""


class HostState(NamedTuple):
    """How one service is.

    Attributes:
        state: `starting` (its model may have to be fetched), `loading`, `serving`, `failed`, `away` or `dead`.
        reason: why it failed, or empty.
        address: where it listens, or empty.
        node: address of its node.
    """

    state: str
    reason: str
    address: str
    node: str


class ServiceHost:
    """Runs one service for as long as the actor lives; a service that ends, ends the actor, and Ray starts it anew."""

    async def __init__(self, config: TargetConfig | DraftConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        set_environment()
        role: Role = "target" if isinstance(config, TargetConfig) else "draft"
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s")
        self._node = ray.util.get_node_ip_address()
        self._config = config
        self._status = HostState(STARTING, "", "", self._node)
        self._service: Service | None = None
        self._life = asyncio.create_task(self._live(role), name=f"{role} service")

    async def address(self) -> str:
        """Where the service listens, or empty while it does not."""
        return self._status.address

    async def state(self) -> HostState:
        """How the service is."""
        return self._status

    async def restart(self) -> None:
        """Let what is running end, for as long as SIGTERM would, then end the actor; Ray starts it anew."""
        if self._service is not None:
            await self._service.stop(self._config.drain_seconds)
        os._exit(1)

    async def _live(self, role: Role) -> None:
        served = False
        try:
            config = await asyncio.to_thread(located, self._config, role)
            self._service = service = _service(replace(config, host=self._node, port=0))
            port = await service.start()
            self._status = HostState(LOADING, "", _address(self._node, port), self._node)
            await service.ready()
            self._status, served = self._status._replace(state=SERVING), True
            await service.failure()
        except OutriderError as error:
            logger.error("%s", error)
            self._status = HostState(FAILED, str(error), "", self._node)
        except Exception as error:
            logger.exception("the service ended")
            self._status = HostState(FAILED, f"{type(error).__name__}: {error}", "", self._node)
        if not served:  # the links of one that served are to end at once, so that its streams go on elsewhere
            await asyncio.sleep(_SHOWN_S)
        os._exit(1)


def _service(config: TargetConfig | DraftConfig) -> Service:
    if isinstance(config, TargetConfig):
        from target_service.service import TargetService

        return TargetService(config)
    from draft_service.service import DraftService

    return DraftService(config)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
