"""A rolling restart of an application: one part after the other, each only once the one before it serves again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from cluster import coordinators, names
from cluster.host import SERVING, HostState
from cluster.report import Report, report, routes
from outrider.errors import Unavailable

Say = Callable[[str], None]

_POLL_S = 0.5


def restart(name: str, *, start_timeout_s: float, say: Say) -> Report:
    """Restart all services and coordinators of an application.

    Where there are two targets and two coordinators no request fails: a target that drains gets no new streams, what
    it has not finished goes on at the other, and Serve replaces coordinators one at a time.

    Args:
        start_timeout_s: how long each part may take.
        say: takes lines of progress.

    Raises:
        Unavailable: there is no such application, not all of it serves, or a part did not come back.
    """
    before = report(name)
    if missing := before.missing():
        raise Unavailable(f"not all of it serves, so nothing is restarted: {'; '.join(missing)}")
    for kind, count in (("target", _count(before, "target/")), ("coordinator", len(before.status.coordinators))):
        if count == 1:
            say(f"there is one {kind} only: requests will be refused while it is away")
    # Drafts first: losing one costs speed alone.
    for service, state in sorted(before.status.services.items()):
        say(f"restarting {service}")
        _restart_service(name, service, state, time.monotonic() + start_timeout_s)
    say("restarting the coordinators")
    return _replace_coordinators(name, before, time.monotonic() + start_timeout_s)


def _count(now: Report, prefix: str) -> int:
    return sum(service.startswith(prefix) for service in now.status.services)


def _found(actor: str) -> Any:
    if (handle := names.find(actor)) is None:
        raise Unavailable(f"{actor} is gone")
    return handle


def _restart_service(name: str, service: str, before: HostState, end_s: float) -> None:
    _found(f"{name}/{service}").restart.remote()
    # It listens at another port then.
    while (now := report(name).status.services[service]).state != SERVING or now.address == before.address:
        if time.monotonic() > end_s:
            raise Unavailable(f"{service} has not come back: it is {now.state} {now.reason}")
        time.sleep(_POLL_S)


def _replace_coordinators(name: str, before: Report, end_s: float) -> Report:
    plan: Any = ray.get(_found(names.keeper(name)).plan.remote())
    route = routes()[name]
    # The same application once more: Serve takes it for a new version, and replaces its replicas a few at a time.
    serve.run_many(
        [serve.RunTarget(coordinators.bind(plan), name=name, route_prefix=route)], wait_for_applications_running=False
    )
    old = set(before.status.coordinators)
    while (now := report(name)).missing() or old & set(now.status.coordinators):
        if time.monotonic() > end_s:
            raise Unavailable(f"the coordinators have not all been replaced: {'; '.join(now.missing())}")
        time.sleep(_POLL_S)
    return now
