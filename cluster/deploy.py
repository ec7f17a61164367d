"""What `outrider deploy` does to a cluster: start an application, and take it away again if it does not start."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.exceptions import RayServeException

from cluster import coordinators, keeper, names, placement
from cluster.host import DEAD, FAILED
from cluster.keeper import UNSEEN, Status
from cluster.plan import Plan
from cluster.removal import remove_own
from cluster.report import DEPLOY_FAILED, Report, report, routes, serve_runs
from outrider.errors import InvalidArgument, Unavailable
from outrider.rpc.exposure import is_loopback

Say = Callable[[str], None]

_POLL_S = 0.5
_KEEPER_STARTS_WITHIN_S = 60.0


def deploy(
    plan: Plan, *, route_prefix: str, host: str, port: int, placement_timeout_s: float, start_timeout_s: float, say: Say
) -> Report:
    """Start an application and wait until all of it serves; what was started is removed again if it does not.

    Args:
        route_prefix: below which its API answers.
        host, port: of Serve's HTTP door, if Serve does not run yet.
        placement_timeout_s: how long the services may wait for room.
        start_timeout_s: how long everything may take.
        say: takes lines of progress.

    Raises:
        InvalidArgument: name or route are taken.
        Unavailable: it did not start; says what is missing.
    """
    began_s = time.monotonic()
    _refuse_plain_text(plan, host)
    _refuse_if_taken(plan.name, route_prefix)
    if left := names.existing(plan.name):
        say(f"removing what an earlier start left behind: {', '.join(left)}")
        remove_own(plan.name)
    try:
        _wait_placed(keeper.ensure(plan), plan, placement_timeout_s, say)
        if serve_runs():
            say("Serve runs already; its HTTP door stays as it is")
        else:
            location = ProxyLocation.HeadOnly if is_loopback(host) else ProxyLocation.EveryNode
            serve.start(http_options=_door(plan, host, port), proxy_location=location)
        target = serve.RunTarget(coordinators.bind(plan), name=plan.name, route_prefix=route_prefix)
        serve.run_many([target], wait_for_applications_running=False)
        return _wait_serving(plan.name, began_s + start_timeout_s, say)
    except RayServeException as error:
        remove_own(plan.name)
        raise Unavailable(f"Serve refused the application: {error}") from None
    except RayError as error:
        remove_own(plan.name)
        raise Unavailable(f"Ray could not start it; is Outrider installed on every node? {error}") from None
    except BaseException:
        say("it did not start; removing what was started")
        remove_own(plan.name)
        raise


def _refuse_if_taken(name: str, route_prefix: str) -> None:
    taken = routes()
    if name in taken and names.find(names.keeper(name)) is not None:
        raise InvalidArgument("name", f"{name} is deployed already; end it with `outrider deploy --remove` first")
    if name in taken:
        raise InvalidArgument(
            "name", f"a Serve application {name!r} that is not Outrider's exists; choose another name"
        )
    for other, route in taken.items():
        if route == route_prefix:
            raise InvalidArgument(
                "route-prefix", f"{route} is taken by the Serve application {other!r}; choose another"
            )


def _refuse_plain_text(plan: Plan, host: str) -> None:
    for node in {host, *(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])}:
        plan.refuse_plain_text(node)


def _door(plan: Plan, host: str, port: int) -> HTTPOptions:
    if plan.certs is None:
        return HTTPOptions(host=host, port=port)
    certificate, key = (f"{plan.certs}/coordinator.{ending}" for ending in ("pem", "key"))
    return HTTPOptions(host=host, port=port, ssl_certfile=certificate, ssl_keyfile=key)


def _wait_placed(kept: Any, plan: Plan, timeout_s: float, say: Say) -> None:
    end, said = time.monotonic() + timeout_s, False
    while shortages := _shortages(kept, plan):
        late_s = time.monotonic() - end
        if late_s > _KEEPER_STARTS_WITHIN_S or (late_s > 0 and UNSEEN not in shortages):
            raise Unavailable("; ".join(shortages))
        if not said:
            say(f"waiting up to {timeout_s:g} s for room")
            said = True
        time.sleep(_POLL_S)


def _shortages(kept: Any, plan: Plan) -> list[str]:
    found = list(Status(*ray.get(kept.status.remote(), timeout=_KEEPER_STARTS_WITHIN_S)).shortages.values())
    if not placement.some_node_has(plan.coordinator_resources):
        wanted = f"{plan.least_coordinators} x coordinator"
        found.append(placement.shortage(wanted, plan.coordinator_resources))
    return found


def _wait_serving(name: str, end_s: float, say: Say) -> Report:
    said = ""
    while missing := (now := report(name)).missing():
        failed = [one for one in now.status.services.values() if one.state in (FAILED, DEAD)]
        if failed:
            raise Unavailable("; ".join(one.reason for one in failed))
        if now.state == DEPLOY_FAILED:
            raise Unavailable(f"the coordinators did not start: {now.message}")
        if time.monotonic() > end_s:
            raise Unavailable(f"not all of it serves in time: {'; '.join(missing)}")
        if said != (said := missing[0]):
            say(f"waiting: {said}")
        time.sleep(_POLL_S)
    return now
