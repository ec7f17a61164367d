"""`python -m cluster`, which `outrider deploy` runs."""

from __future__ import annotations

import json
import logging
import signal
import sys
from typing import Any

import ray
from rich.table import Table

from cluster import arguments
from cluster.connection import connected
from cluster.deploy import deploy
from cluster.removal import remove
from cluster.report import Report, report
from cluster.restart import restart
from outrider.console import out, say
from outrider.errors import OutriderError

logger = logging.getLogger("cluster")


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="outrider: %(message)s", stream=sys.stderr)
    given = arguments.parser().parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if not (given.remove or given.status or given.restart):
            arguments.plan(given, has_gpus=False)  # what is wrong with the options is said before anything is joined
        with connected(given.address):
            return _act(given)
    except OutriderError as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return 130


def _act(given: Any) -> int:
    signal.signal(signal.SIGTERM, _interrupt)  # Ray has put its own in place
    if given.remove:
        remove(given.name)
        out.print(f"removed {given.name}")
        return 0
    if given.restart:
        _show(restart(given.name, start_timeout_s=given.start_timeout_s, say=say))
        return 0
    if given.status:
        now = report(given.name)
        if given.json:
            print(json.dumps(_as_json(now)))  # noqa: T201 - for programs
        else:
            _show(now)
        return 1 if now.missing() else 0
    plan = arguments.plan(given, has_gpus=bool(ray.cluster_resources().get("GPU")))
    now = deploy(
        plan,
        route_prefix=given.route_prefix,
        host=given.host,
        port=given.port,
        placement_timeout_s=given.placement_timeout_s,
        start_timeout_s=given.start_timeout_s,
        say=say,
    )
    _show(now)
    return 0


def _show(now: Report) -> None:
    model = next((one.model for one in now.status.coordinators.values() if one.model), "")
    out.print(f"serving {model} at {now.url}" if not now.missing() else "not all of it serves", markup=False)
    table = Table("part", "state", "node", "address", box=None)
    for name, service in sorted(now.status.services.items()):
        table.add_row(name, service.state, service.node, service.address)
    for name, one in sorted(now.status.coordinators.items()):
        table.add_row(f"coordinator {name}", one.reason or "serving", one.node, f"gRPC {one.grpc}")
    out.print(table)
    for line in now.missing():
        out.print(line, markup=False)


def _as_json(now: Report) -> dict[str, Any]:
    return {
        "application": now.state,
        "url": now.url,
        "missing": now.missing(),
        "services": {name: one._asdict() for name, one in now.status.services.items()},
        "coordinators": {name: one._asdict() for name, one in now.status.coordinators.items()},
    }


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
