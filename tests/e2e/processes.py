"""What the end-to-end tests share: parts as processes of their own, started as an operator starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from outrider.ports import free_port

WITHIN_S = 90.0
"""How long anything may take before a test fails; far above what a loaded machine needs."""


@dataclass(frozen=True, slots=True)
class Part:
    """A running part.

    Attributes:
        home: its home folder, of its own.
        port: of its gRPC server, or of the coordinator's HTTP door.
    """

    process: subprocess.Popen[str]
    log: Path
    home: Path
    port: int

    @property
    def url(self) -> str:
        """Of a coordinator."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def family(self) -> list[psutil.Process]:
        """Its process and all below it."""
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def text(self) -> str:
        """What it wrote."""
        return self.log.read_text()


@contextmanager
def service(module: str, model: str, folder: Path, *arguments: str) -> Iterator[Part]:
    """A draft or target service that listens; the coordinator waits for its model."""
    given = ["--model", model, "--port", "0", "--threads", "1", *arguments]
    with started(module, given, folder) as (process, log):
        wait_for(lambda: _listening(log) is not None, process, log)
        port = _listening(log)
        assert port is not None
        yield Part(process, log, folder, port)


@contextmanager
def coordinator(folder: Path, *arguments: str, path: str = "/health", **environment: str) -> Iterator[Part]:
    """A coordinator that answers 200 at `path`."""
    port = free_port()
    given = ["--port", str(port), "--grpc-port", "0", *arguments]
    with started("coordinator", given, folder, **environment) as (process, log):
        part = Part(process, log, folder, port)
        wait_for(lambda: answers(part.url + path), process, log)
        yield part


@contextmanager
def started(
    module: str, arguments: list[str], folder: Path, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A part's process and its log, for as long as the context lasts."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=output,
            stderr=output,
            text=True,
            env={**os.environ, "HOME": str(folder), **environment},
            start_new_session=True,
        )
    try:
        yield process, log
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(WITHIN_S)


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str], log: Path, within_s: float = WITHIN_S
) -> None:
    """Waits for something that the process does; shows its log if it does not."""
    end = time.monotonic() + within_s
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def answers(url: str, within_s: float = 5.0) -> bool:
    """Whether a GET is answered 200."""
    try:
        return httpx.get(url, timeout=within_s, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def is_whole(url: str) -> bool:
    """Whether a coordinator misses no part; it is ready before its draft, which it needs for no answer."""
    try:
        answer = httpx.get(url + "/ready", timeout=5.0, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and answer.json()["degraded"] == []


def wait_gone(processes: list[psutil.Process]) -> list[str]:
    """Command lines of those that are still there at the end."""
    _, alive = psutil.wait_procs(processes, timeout=30.0)
    return [" ".join(process.cmdline()) for process in alive]


def _listening(log: Path) -> int | None:
    found = re.search(r"listening on \S+:(\d+)", log.read_text())
    return int(found[1]) if found else None
