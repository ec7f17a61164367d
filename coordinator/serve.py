"""The Ray Serve application: the doors of one coordinator in a replica of their own.

Of `Coordinator` there may be several, behind Serve's proxies; `SoleCoordinator` is the one of a machine and listens
itself.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any, NamedTuple

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from coordinator.app import build_app
from coordinator.confine import confine
from coordinator.decoder import Decoder
from coordinator.front import Front
from coordinator.http_door import HttpDoor
from coordinator.options import Addresses, Options
from coordinator.part_series import CertificateSeries
from coordinator.servicer import CoordinatorServicer
from outrider import log_format, tracing
from outrider.errors import Unavailable
from outrider.rpc.credentials import server_credentials
from outrider.rpc.options import COORDINATOR_SERVICE_NAME
from outrider.rpc.server import Server
from outrider.v1 import coordinator_pb2_grpc

logger = logging.getLogger(__name__)

APPLICATION = "outrider"
_MAX_ONGOING_REQUESTS = 100_000
"""Serve's own limit (5 by default) must never be the one that is reached: admission refuses with a proper error."""
_MAX_MESSAGE_BYTES = 16 << 20
HEALTH_CHECK_S = 2.0
"""How often Serve looks whether a coordinator is alive; by default it leaves one that died unnoticed for 10 s."""
_QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)
_HEALTH_POLL_S = 0.2
_FAREWELL_S = 1.0


class Status(NamedTuple):
    """What the launcher waits for.

    Attributes:
        reason: why requests are not taken, or empty.
        model: name of the served model, or empty.
    """

    reason: str
    model: str
    grpc_port: int


@serve.ingress()
class Coordinator:
    """One coordinator: the HTTP application, the gRPC server and the decoder on one event loop."""

    async def __init__(self, options: Options) -> None:  # type: ignore[misc]  # Serve awaits it
        logging.basicConfig(level=options.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        if options.log_format == log_format.JSON:
            log_format.write_json("coordinator", options.log_level)
        confine(ray.util.get_node_ip_address())
        tracer = tracing.tracer("coordinator", options.otlp_endpoint, options.trace_sample_rate)
        self._front = Front(Decoder(options.decoder), options.front, tracer)
        files = (options.addresses.tls.certfile, options.decoder.tls.certfile, options.decoder.tls.ca_certs)
        self._front.metrics.registry.register(CertificateSeries(files))
        self._draining: asyncio.Task[int] | None = None
        self._grpc_port = await self._listen(options.addresses)
        await self._front.start()
        self._health = asyncio.create_task(self._report_health())

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        return build_app(lambda: self._front, lambda: self._exposition())

    async def status(self) -> Status:
        """Whether requests are taken."""
        reason = self._front.readiness.reason
        return Status(reason, "" if reason else self._front.model.name, self._grpc_port)

    async def drain(self, timeout_s: float) -> int:
        """Take no new requests, let the others end within `timeout_s` seconds, and close the doors.

        Returns:
            Answers that did not end, whose clients got an error.
        """
        self._draining = asyncio.create_task(self._drain(timeout_s), name="drain")
        return await asyncio.shield(self._draining)

    async def hurry(self) -> None:
        """Let a drain end at once; returns when it has."""
        self._front.hurry()
        if self._draining is not None:
            await asyncio.wait((self._draining,))

    async def _drain(self, timeout_s: float) -> int:
        self._health.cancel()
        await self._server.set_serving(value=False)
        cut = await self._front.drain(timeout_s)
        await self._front.close()  # before the doors: whoever still waits is told why there is no more
        await self._server.stop(grace_s=_FAREWELL_S)
        return cut

    async def _listen(self, addresses: Addresses) -> int:
        """Opens the gRPC door; returns its port.

        Raises:
            PortInUse: naming the address.
        """
        credentials = server_credentials(addresses.tls)
        self._server = Server(COORDINATOR_SERVICE_NAME, message_limit=_MAX_MESSAGE_BYTES, credentials=credentials)
        servicer = CoordinatorServicer(self._front)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, self._server.grpc)
        return await self._server.start(addresses.host, addresses.grpc_port)

    async def _exposition(self) -> bytes:
        """What `/metrics` answers."""
        return self._front.metrics.render()

    async def _report_health(self) -> None:
        settled = False
        while True:
            ready = not self._front.readiness.reason
            if ready and not settled:
                _settle()
                settled = True
            if ready != self._server.serving:
                await self._server.set_serving(value=ready)
            await asyncio.sleep(_HEALTH_POLL_S)


class SoleCoordinator(Coordinator):  # type: ignore[misc,valid-type]  # Serve's decorators have no types
    """The one coordinator of a machine: its HTTP door is its own."""

    async def __init__(self, options: Options) -> None:  # type: ignore[misc]  # Serve awaits it
        await super().__init__(options)
        app = build_app(lambda: self._front, lambda: self._exposition())
        addresses = options.addresses
        self._http = await HttpDoor.open(app, addresses.http_host or addresses.host, addresses.port)

    async def _drain(self, timeout_s: float) -> int:
        cut = await super()._drain(timeout_s)
        await self._http.close()
        return cut


def _settle() -> None:
    """What a start leaves, vocabulary and libraries, stays for good: kept from the collector, which would take a tenth
    of a second to walk through it while answers wait."""
    gc.collect()
    gc.freeze()


def run(options: Options) -> DeploymentHandle[Any]:
    """Start the application in the Ray that this process is connected to; returns when it answers.

    Raises:
        Unavailable: Serve gave up on it.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location=ProxyLocation.Disabled, logging_config=_QUIET)
    deployment = serve.deployment(
        name="coordinator",
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=options.grace_s,
        health_check_period_s=HEALTH_CHECK_S,
        ray_actor_options={"num_cpus": 0},
        logging_config=_QUIET,
    )
    try:
        application = deployment(SoleCoordinator).bind(options)
        return serve.run(application, name=APPLICATION, route_prefix="/", logging_config=_QUIET)
    except RuntimeError as error:
        raise Unavailable(f"the Ray Serve application did not start: {error}") from error


def answer(response: Any, timeout_s: float) -> Any:
    """What a call of the coordinator returned, None where it did not answer: Serve is starting it anew, or Ray ends."""
    try:
        return response.result(timeout_s=timeout_s)
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("the coordinator did not answer: %s", type(error).__name__)
        return None
