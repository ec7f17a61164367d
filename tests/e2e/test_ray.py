"""The coordinator's private Ray: beside a foreign one, small, and gone when the coordinator is, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from outrider.ports import free_port
from outrider.rpc.exposure import is_loopback
from tests.e2e.processes import WITHIN_S, Part, answers, coordinator, wait_gone

MAX_RESIDENT_BYTES = 1_500_000_000

FOREIGN = """
import http.server, shutil, sys, tempfile, threading
import ray

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

@ray.remote
class Echo:
    def start(self, port):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()

directory = tempfile.mkdtemp(prefix="foreign-", dir="/tmp")
ray.init(address="local", _temp_dir=directory, include_dashboard=False, num_cpus=1)
echo = Echo.remote()
ray.get(echo.start.remote(int(sys.argv[1])))
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
shutil.rmtree(directory, ignore_errors=True)
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Part]:
    with coordinator(tmp_path_factory.mktemp("coordinator")) as running:
        yield running


def test_it_is_small_and_holds_no_torch(running: Part) -> None:
    """Guards the memory of the whole stack: Ray and the replica, shared pages counted once."""
    family = running.family
    assert sum(process.memory_full_info().pss for process in family) < MAX_RESIDENT_BYTES
    assert any("ServeReplica" in " ".join(process.cmdline()) for process in family)
    for process in family:
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), process


def test_every_port_is_on_loopback(running: Part) -> None:
    """Guards against Ray's ports on the network: Serve unpickles what comes in at one of them, whoever sent it."""
    listening = {
        (process.name(), connection.laddr.ip)
        for process in running.family
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(listening) > 3
    assert [one for one in listening if not is_loopback(one[1].removeprefix("::ffff:"))] == []


def test_it_leaves_no_trace_in_the_home_folder(running: Part) -> None:
    """Guards against tokens and settings that would reach other Rays of the same user."""
    assert not (running.home / ".ray").exists()


def test_a_busy_port_names_itself(running: Part) -> None:
    """Guards against a failure that only Ray's log files explain."""
    command = [sys.executable, "-m", "coordinator", "--port", str(running.port), "--grpc-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 1
    assert f"127.0.0.1:{running.port}" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_target_it_is_alive_and_not_ready(running: Part) -> None:
    """Guards against restarts by a liveness probe for a fault that lies elsewhere."""
    assert httpx.get(running.url + "/ready", trust_env=False).status_code == 503
    response = httpx.post(running.url + "/v1/completions", json={"prompt": "hi"}, trust_env=False)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "service_unavailable_error"


def test_a_foreign_ray_answers_throughout(tmp_path: Path) -> None:
    """Guards against joining, disturbing or stopping a cluster that an environment variable points to.

    SIGTERM ends the coordinator with status 0 and leaves none of its own processes behind.
    """
    port, stop, failures = free_port(), threading.Event(), []
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", FOREIGN, str(port)]
    foreign = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    family = []
    try:
        assert foreign.stdout is not None and foreign.stdin is not None
        address = foreign.stdout.readline().strip()
        url = f"http://127.0.0.1:{port}/"
        family = psutil.Process(foreign.pid).children(recursive=True)

        def ask() -> None:
            while not stop.is_set():
                if not answers(url):
                    failures.append(time.monotonic())
                stop.wait(0.05)

        asking = threading.Thread(target=ask)
        asking.start()
        with coordinator(tmp_path / "own", RAY_ADDRESS=address) as own:
            assert answers(own.url + "/health")
            own_family = own.family
            assert {process.pid for process in own_family}.isdisjoint(process.pid for process in family)
        assert own.process.returncode == 0, own.text()
        assert wait_gone(own_family[1:]) == []
        assert answers(url)
        stop.set()
        asking.join()
        assert not failures
        assert all(process.is_running() for process in family)
    finally:
        stop.set()
        foreign.stdin.close()
        foreign.wait(WITHIN_S)
        for process in family:
            if process.is_running():
                process.kill()


def test_a_killed_coordinator_leaves_no_process_behind(tmp_path: Path) -> None:
    """Guards against Ray's agents, which outlive a killed driver by minutes, and against its files."""
    with coordinator(tmp_path) as running:
        family = running.family
        (directory,) = {
            argument.split("=", 1)[1]
            for process in family
            for argument in process.cmdline()
            if argument.startswith("--temp-dir=")
        }
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
        assert wait_gone(family[1:]) == []
        assert not Path(directory).exists()
