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
from contextlib import ExitStack, contextmanager
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

_TRIES = 3
_VITAL = ("gcs_server", "raylet")


@contextmanager
def local_ray(*, bare_lines: bool = False) -> Iterator[Path]:
    """Starts it, and stops it at the end; yields its directory. Ray must not have been imported before.

    Args:
        bare_lines: leaves out the prefix with which Ray marks its workers' lines of output.

    Raises:
        Unavailable: it did not start, though it was tried several times.
    """
    _isolate()
    if bare_lines:
        os.environ["RAY_DISABLE_WORKER_LOG_PREFIX"] = "1"
    with ExitStack() as cleanup:
        yield _started(cleanup)


def _started(cleanup: ExitStack) -> Path:
    """Ray gives its own processes 30 s, which no setting changes; a second try finds them in the page cache."""
    for tries_left in reversed(range(_TRIES)):
        with ExitStack() as attempt:
            directory = attempt.enter_context(_directory())
            try:
                _init(directory)
            except Exception as error:  # a machine too busy, too little shared memory: Ray has no type for it
                if not tries_left:
                    raise Unavailable(f"Ray did not start in {_TRIES} tries: {error}") from None
                logger.warning("Ray did not start, trying again: %s", error)
            else:
                cleanup.push(attempt.pop_all())
                return directory
    raise AssertionError("unreachable")


@contextmanager
def _directory() -> Iterator[Path]:
    """For one Ray, whose processes and files are gone afterwards, whatever ended it."""
    # Unix sockets lie below this directory and their paths may have 107 bytes; TMPDIR is often longer than that allows.
    directory = Path(tempfile.mkdtemp(prefix="outrider-", dir="/tmp"))
    watcher = subprocess.Popen(
        [sys.executable, "-I", keeper.__file__, str(directory)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # whatever kills the coordinator's process group must not kill this
    )
    try:
        yield directory
    finally:
        import ray

        ray.shutdown()
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait()


def _init(directory: Path) -> None:
    import ray

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
