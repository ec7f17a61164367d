"""The Serve application on a cluster: coordinators that find their services by name and report to the keeper."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import LoggingConfig

from cluster import keeper
from cluster.plan import Plan
from cluster.resources import actor_options
from cluster.roll import Member
from coordinator.options import Addresses
from coordinator.serve import HEALTH_CHECK_S, Coordinator
from outrider.errors import Mismatch, OutriderError, Unavailable
from outrider.rpc.server import PortInUse

logger = logging.getLogger(__name__)

DEPLOYMENT = "coordinator"
_REPORT_S = 1.0
_ANSWER_S = 5.0
_GOODBYE_S = 5.0
_TRIES = 6
"""A coordinator that cannot start says why after so many tries; by default Serve makes many times as many."""


class ClusterCoordinator(Coordinator):  # type: ignore[misc,valid-type]  # Serve's decorators have no types
    """One coordinator among several."""

    async def __init__(self, plan: Plan) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        # The name under which Serve runs the application, whatever its file says.
        plan = replace(plan, name=context.app_name)
        self._replica = str(context.replica_id.unique_id)
        self._drain_s = plan.options.drain_timeout_s
        self._drained = True  # there is nothing to drain yet
        self._node = ray.util.get_node_ip_address()
        self._keeper = await asyncio.to_thread(keeper.ensure, plan)
        kept = await self._ask(self._keeper.plan.remote())
        if kept.services != plan.services:
            raise Mismatch("the services run by another plan than this; `outrider deploy --remove` ends them")
        ordinal = await self._ask(self._keeper.join.remote(self._replica))
        await super().__init__(plan.coordinator(self._node, ordinal))
        self._reporting = asyncio.create_task(self._report_for_ever(), name="report to the keeper")
        self._drained = False

    async def __del__(self) -> None:
        """Called by Serve when the replica is to end and has answered what came over HTTP; gRPC may still be busy."""
        if not self._drained:
            self._drained = True
            self._reporting.cancel()
            await self.drain(self._drain_s)
            with contextlib.suppress(OutriderError):
                await self._ask(self._keeper.leave.remote(self._replica, self._own_exposition()))
        await super().__del__()  # type: ignore[misc]  # of the class that Serve's decorator makes

    async def _listen(self, addresses: Addresses) -> int:
        """The port that was asked for, or a free one where another replica on this node has it."""
        try:
            return int(await super()._listen(addresses))
        except PortInUse:
            # On a server of its own: gRPC's credentials can be used once.
            return int(await super()._listen(replace(addresses, grpc_port=0)))

    async def _exposition(self) -> bytes:
        """The series of all coordinators: the keeper's word alone, so that no sum ever falls between two scrapes."""
        await self._report()
        return (await self._ask(self._keeper.exposition.remote())).encode()

    async def _report(self) -> None:
        status = await self.status()
        host = f"[{self._node}]" if ":" in self._node else self._node
        member = Member(self._node, f"{host}:{status.grpc_port}", status.reason, status.model)
        await self._ask(self._keeper.report.remote(self._replica, member, self._own_exposition()))

    def _own_exposition(self) -> str:
        return str(self._front.metrics.render().decode())

    async def _report_for_ever(self) -> None:
        while True:
            try:
                await self._report()
            except OutriderError as error:
                logger.warning("%s", error)
            except Exception:
                logger.exception("the report to the keeper failed")
            await asyncio.sleep(_REPORT_S)

    @staticmethod
    async def _ask(answer: Any) -> Any:
        """
        Raises:
            Unavailable: the keeper does not answer; Ray is starting it anew.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        except (RayError, TimeoutError) as error:
            raise Unavailable(f"the keeper of this application does not answer ({type(error).__name__})") from None


def bind(plan: Plan) -> serve.Application:
    """The application of a plan."""
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    deployment = serve.deployment(
        name=DEPLOYMENT,
        max_ongoing_requests=plan.max_ongoing_requests,
        max_queued_requests=plan.max_ongoing_requests,
        autoscaling_config={
            "min_replicas": plan.least_coordinators,
            "initial_replicas": plan.least_coordinators,
            "max_replicas": plan.most_coordinators,
            "target_ongoing_requests": plan.target_ongoing_requests,
        },
        graceful_shutdown_timeout_s=plan.options.grace_s + _GOODBYE_S,
        health_check_period_s=HEALTH_CHECK_S,
        ray_actor_options=actor_options(plan.coordinator_resources),
        logging_config=quiet,
        max_constructor_retry_count=_TRIES,
    )
    return deployment(ClusterCoordinator).bind(plan)
