"""How an application is, in the words of its keeper and of Serve."""

from __future__ import annotations

from typing import NamedTuple

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client

from cluster import names
from cluster.host import SERVING
from cluster.keeper import Status
from outrider.errors import Unavailable

RUNNING, DEPLOY_FAILED = "RUNNING", "DEPLOY_FAILED"
"""States of an application, in Serve's words."""
_ANSWER_S = 10.0


class Report(NamedTuple):
    """How an application is.

    Attributes:
        state: what Serve says of it, or empty where it does not know it.
        message: what it adds to that, such as why a coordinator could not start.
        url: where its API is, or empty.
    """

    state: str
    message: str
    url: str
    status: Status

    def missing(self) -> list[str]:
        """What does not serve yet."""
        found = list(self.status.shortages.values())
        found += [
            f"{name} is {service.state}{': ' + service.reason if service.reason else ''}"
            for name, service in self.status.services.items()
            if service.state != SERVING
        ]
        if self.state != RUNNING:
            found.append(
                f"the Serve application is {self.state or 'missing'}{': ' + self.message if self.message else ''}"
            )
        found += [f"coordinator {name}: {one.reason}" for name, one in self.status.coordinators.items() if one.reason]
        if not self.status.coordinators:
            found.append("no coordinator has reported yet")
        return found


def report(name: str) -> Report:
    """How an application is.

    Raises:
        Unavailable: there is none of that name, or its keeper does not answer.
    """
    kept = names.find(names.keeper(name))
    if kept is None:
        raise Unavailable(f"Outrider has no application {name!r} on this cluster")
    try:
        status = Status(*ray.get(kept.status.remote(), timeout=_ANSWER_S))
    except RayError as error:
        raise Unavailable(
            f"the keeper of {name} does not answer ({type(error).__name__}); Ray may restart it"
        ) from None
    application = serve.status().applications.get(name)
    if application is None:
        return Report("", "", _url(name), status)
    messages = [application.message, *(one.message for one in application.deployments.values())]
    message = next((one.strip().splitlines()[-1] for one in messages if one.strip()), "")
    return Report(str(application.status.value), message, _url(name), status)


def serve_runs() -> bool:
    """Whether the cluster has a Serve."""
    return _get_global_client(raise_if_no_controller_running=False) is not None


def routes() -> dict[str, str | None]:
    """Route of each of Serve's applications.

    Serve tells routes and its door to the dashboard only; this is where the dashboard has them from.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    applications = {} if client is None else client.get_serve_details()["applications"]
    return {name: one["route_prefix"] for name, one in applications.items() if one["status"] != "DELETING"}


def _url(name: str) -> str:
    client, route = _get_global_client(raise_if_no_controller_running=False), routes().get(name)
    if client is None or route is None:
        return ""
    door = client.http_config
    host = f"[{door.host}]" if ":" in door.host else door.host
    return f"{'https' if door.ssl_certfile else 'http'}://{host}:{door.port}{route.rstrip('/')}/v1"
