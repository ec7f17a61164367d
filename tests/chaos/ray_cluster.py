"""A Ray cluster of several nodes on this machine, each with a loopback address of its own, and what runs on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
WITHIN_S = 300.0
"""How long a command may take before a test fails; far above what a loaded machine needs."""
_STORE_BYTES = 80 << 20
HEAD = "127.0.0.2"
"""Not 127.0.0.1: Ray takes that for `this machine` and puts the address of a network card in its place."""

FOREIGN = """
import sys
import ray
from ray import serve

class Foreign:
    def __call__(self, request):
        return "foreign"

ray.init(address=sys.argv[1], log_to_driver=False)
serve.start(http_options={"host": sys.argv[2], "port": int(sys.argv[3])}, proxy_location="HeadOnly")
options = {"num_cpus": 0, "resources": {"front": 0.01}}
serve.run(serve.deployment(Foreign).options(ray_actor_options=options).bind(), name="foreign", route_prefix="/foreign")
"""


@dataclass
class RayCluster:
    """A head with the resource `front`, and nodes with `target` and `draft`.

    Attributes:
        environment: of every process that has to do with it.
    """

    cluster: Any
    environment: dict[str, str]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add_node(self, number: int) -> None:
        """A node at 127.0.0.NUMBER with room for one target and one draft."""
        resources = {"target": 1, "draft": 1}
        self.cluster.add_node(node_ip_address=f"127.0.0.{number}", resources=resources, **self._common())

    def kill_node(self, ip: str) -> None:
        """As when its power fails."""
        (node,) = [node for node in self.cluster.worker_nodes if node.node_ip_address == ip]
        self.cluster.remove_node(node, allow_graceful=False)

    def deploy(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`outrider deploy` on it."""
        command = [sys.executable, "-m", "outrider", "deploy", "--address", self.address, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=WITHIN_S, env=self.environment, check=False
        )

    def status(self) -> dict[str, Any]:
        """What `outrider deploy --status` says."""
        done = self.deploy("--status", "--json")
        assert done.stdout, done.stderr
        found = json.loads(done.stdout)
        assert (done.returncode == 0) == (not found["missing"])
        return dict(found)

    def start_foreign(self, port: int) -> None:
        """Serve, with an application of somebody else's at /foreign."""
        command = [sys.executable, "-c", FOREIGN, self.address, HEAD, str(port)]
        subprocess.run(command, env=self.environment, timeout=WITHIN_S, check=True, capture_output=True)

    def start_head(self) -> None:
        self.cluster.add_node(node_ip_address=HEAD, resources={"front": 1}, **self._common())

    def _common(self) -> dict[str, Any]:
        directory = self.environment["RAY_TMPDIR"]
        return {
            "temp_dir": directory,
            "num_cpus": 0,
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": False,
        }


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A head and two nodes; all their processes and files are gone in the end."""
    # Unix sockets lie below this directory and their paths may have 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="outrider-", dir="/tmp"))
    (directory / "ray").mkdir()  # where Ray notes the address of the last cluster; not where the user's own Ray does
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update(RAY_TMPDIR=str(directory), RAY_USAGE_STATS_ENABLED="0", HOME=str(directory), PYTHONPATH=str(ROOT))
    from ray.cluster_utils import Cluster

    made = RayCluster(Cluster(), dict(os.environ))
    try:
        made.start_head()
        for number in (3, 4):
            made.add_node(number)
        yield made
    finally:
        made.cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(directory, ignore_errors=True)
