"""A Ray of the coordinator's own on this machine, beside whatever other Ray there is.

It has its own directory, ports and secret token, takes no part in any cluster that an environment variable or a file
names, writes nothing to the user's home, sends no usage statistics, and ends with the coordinator however that ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator import keeper
from outrider.errors import Unavailable

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 << 20
"""Nothing of size passes through the object store; this is close to the least that Ray takes."""
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray puts the address of a network card in the place of loopback, and then listens on all of them, except where it
    # is told that this machine is in no cluster. The name is that of the systems on which it thinks so by itself.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray runs its workers at niceness 15, so that its own processes come first. The coordinator is on the path of
    # every token: behind a service that computes on the same cores it would be scheduled last, in every round.
    "RAY_worker_niceness": "0",
    # A dead HTTP door is opened again after three looks at it, by default one every 10 s.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}

_VITAL = ("gcs_server", "raylet")


@contextmanager
def local_ray(*, bare_lines: bool = False) -> Iterator[Path]:
    """Starts it, and stops it at the end; yields its directory. Ray must not have been imported before.

    Args:
        bare_lines: leaves out the prefix with which Ray marks its workers' lines of output.
    """
    _isolate()
    if bare_lines:
        os.environ["RAY_DISABLE_WORKER_LOG_PREFIX"] = "1"
    # Unix sockets lie below this directory and their paths may have 107 bytes; TMPDIR is often longer than that allows.
    directory = Path(tempfile.mkdtemp(prefix="outrider-", dir="/tmp"))
    watcher = subprocess.Popen(
        [sys.executable, "-I", keeper.__file__, str(directory)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # whatever kills the coordinator's process group must not kill this
    )
    import ray

    try:
        try:
            ray.init(
                address="local",
                _temp_dir=str(directory),
                _node_ip_address="127.0.0.1",
                num_cpus=0,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                configure_logging=False,
            )
        except Exception as error:  # a machine too busy for its 30 s, too little shared memory: Ray has no type for it
            raise Unavailable(f"Ray did not start: {error}") from None
        yield directory
    finally:
        ray.shutdown()
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait()


def dead_process() -> str:
    """Name of a process of this Ray that has ended by itself, or empty.

    Without its head or its raylet a Ray goes on for a while, lets nothing start again, and then ends; in its own words
    this is for the programs that started it to find out.
    """
    import ray._private.worker

    node = ray._private.worker._global_node
    names: list[str] = [name for name, _ in node.dead_processes()] if node is not None else []
    return next((name for name in names if name in _VITAL), "")


def _isolate() -> None:
    """No setting of another Ray reaches this one, neither an address nor a token."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update(_SETTINGS, RAY_AUTH_TOKEN=secrets.token_hex(32))
