"""The keeper: one actor per application that keeps its services running and knows its coordinators.

It lives apart from Serve's replicas, so that coordinators come and go while services keep their models. Ray starts it
anew when its node dies; all that it needs is in its plan and in what is found by name, so it carries on from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from cluster import names, placement
from cluster.host import AWAY, DEAD, STARTING, HostState
from cluster.plan import Plan, ServicePlan
from cluster.roll import Member, Roll

logger = logging.getLogger(__name__)

_ROUND_S = 1.0
_ANSWER_S = 2.0


UNSEEN = "not looked at yet"


class Status(NamedTuple):
    """How the application is.

    Attributes:
        shortages: by role, why it has not been placed, `UNSEEN` at first; absent once it has been.
        services: by actor name without the application's.
        coordinators: by replica.
    """

    shortages: Mapping[str, str]
    services: Mapping[str, HostState]
    coordinators: Mapping[str, Member]


class Keeper:
    """Its methods answer at once and from any thread; what takes time happens in a thread of its own."""

    def __init__(self, plan: Plan) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s keeper %(levelname)s %(name)s: %(message)s")
        self._plan = plan
        self._lock = threading.Lock()
        self._roll = Roll()
        self._shortages: dict[str, str] = dict.fromkeys((service.role for service in plan.services), UNSEEN)
        self._services: dict[str, HostState] = {}
        self._handles: dict[str, list[Any]] = {}
        threading.Thread(target=self._keep, name="keep the services", daemon=True).start()

    def plan(self) -> Plan:
        """What it keeps."""
        return self._plan

    def join(self, replica: str) -> int:
        """As `Roll.join`."""
        with self._lock:
            return self._roll.join(replica, time.monotonic())

    def report(self, replica: str, member: Member, exposition: str) -> None:
        """As `Roll.report`; called about once a second, and before the series are asked for."""
        with self._lock:
            self._roll.report(replica, member, exposition, time.monotonic())

    def leave(self, replica: str, exposition: str) -> None:
        """As `Roll.leave`."""
        with self._lock:
            self._roll.leave(replica, exposition)

    def exposition(self) -> str:
        """The series of all coordinators together."""
        with self._lock:
            return self._roll.exposition(time.monotonic())

    def status(self) -> Status:
        """How services and coordinators are."""
        with self._lock:
            return Status(dict(self._shortages), dict(self._services), self._roll.members(time.monotonic()))

    # ---- services ----

    def _keep(self) -> None:
        while True:
            for service in self._plan.services:
                try:
                    self._look_after(service)
                except RayError as error:
                    logger.warning("%s: %s", service.role, error)
            time.sleep(_ROUND_S)

    def _look_after(self, service: ServicePlan) -> None:
        handles = self._handles.get(service.role) or self._place(service)
        refs = [handle.state.remote() for handle in handles]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=_ANSWER_S)
        for index, ref in enumerate(refs):
            name = f"{service.role}/{index}"
            state = _answer(ref, self._services.get(name))
            with self._lock:
                self._services[name] = state
            if state.state == DEAD:  # not restarted by Ray, so somebody killed it, or it cannot even be made
                self._handles.pop(service.role, None)

    def _place(self, service: ServicePlan) -> list[Any]:
        """The actors of a role, made where they are missing; none while there is no room for them."""
        group = placement.ensure_group(self._plan.name, service)
        if service.role in self._shortages:
            wanted = f"{service.replicas} x {service.role}"
            shortage = None if placement.is_placed(group) else placement.shortage(wanted, service.resources)
            with self._lock:
                if shortage is not None:
                    self._shortages[service.role] = shortage
                    return []
                del self._shortages[service.role]
        self._handles[service.role] = [
            placement.ensure_service(self._plan.name, service, index, group) for index in range(service.replicas)
        ]
        return self._handles[service.role]


def _answer(ref: Any, before: HostState | None) -> HostState:
    """What a service's actor said; while it has not answered yet, its first node may still be starting it."""
    try:
        return HostState(*ray.get(ref, timeout=0))
    except GetTimeoutError:
        ray.cancel(ref)
        state, reason = (STARTING, "") if before is None or before.state == STARTING else (AWAY, "does not answer")
    except ActorDiedError as error:
        state, reason = DEAD, _first_line(error)
    except RayError as error:
        state, reason = AWAY, _first_line(error)
    return HostState(state, reason, "", before.node if before is not None else "")


def _first_line(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def ensure(plan: Plan) -> Any:
    """The application's keeper, made if there is none; blocks on Ray's control store."""
    return (
        ray.remote(Keeper)
        .options(
            name=names.keeper(plan.name),
            namespace=names.NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            max_concurrency=32,
        )
        .remote(plan)
    )
