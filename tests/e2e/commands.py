"""The `outrider` command as a process, with a cache of its own, so that no stack of the user's is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from outrider.ports import free_port
from tests.e2e.processes import WITHIN_S, wait_for

COMMAND = Path(sys.executable).with_name("outrider")
_GONE_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Up:
    """A running `outrider up`.

    Attributes:
        cache: Outrider's folder in the user's cache, of its own.
        ports: by flag.
        log: what it printed.
    """

    process: subprocess.Popen[str]
    cache: Path
    ports: Mapping[str, int]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['port']}"

    def text(self) -> str:
        return self.log.read_text()

    def wait_text(self, *wanted: str) -> None:
        """Waits until each of these stands behind the one before it."""

        def found() -> bool:
            rest = self.text()
            for part in wanted:
                _, match, rest = rest.partition(part)
                if not match:
                    return False
            return True

        wait_for(found, self.process, self.log)

    def wait_serving(self) -> None:
        self.wait_text("serving ", f"{self.url}/v1")

    def parts(self) -> list[psutil.Process]:
        """All processes below it."""
        return psutil.Process(self.process.pid).children(recursive=True)


def outrider(cache: Path | None, *arguments: str, timeout_s: float = WITHIN_S) -> subprocess.CompletedProcess[str]:
    """Runs a command that ends; without a cache, in the user's own."""
    environment = dict(os.environ) if cache is None else _environment(cache)
    command = [COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)


@contextmanager
def up(cache: Path, *arguments: str) -> Iterator[Up]:
    """A stack that has begun to start; whatever is left of it in the end is killed."""
    ports = {flag: free_port() for flag in ("port", "grpc-port", "target-port", "draft-port")}
    flags = [text for flag, port in ports.items() for text in (f"--{flag}", str(port))]
    log = cache / "up.log"
    # A test run in the background ignores SIGINT, and its children would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with open(log, "w") as output:
            process = subprocess.Popen(
                [COMMAND, "up", *arguments, *flags],
                stdout=output,
                stderr=output,
                text=True,
                env=_environment(cache),
                start_new_session=True,
            )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield Up(process, cache, ports, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(WITHIN_S)
        for left in relatives(cache):
            with suppress(psutil.NoSuchProcess):
                left.kill()


def relatives(cache: Path) -> list[psutil.Process]:
    """Every process that was started with this cache, wherever it hangs in the process tree now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and process.environ().get("OUTRIDER_CACHE") == str(cache):
                found.append(process)
    return found


def relatives_gone(cache: Path) -> list[str]:
    """Command lines of those that are still there after a while."""
    end = time.monotonic() + _GONE_WITHIN_S
    while (left := relatives(cache)) and time.monotonic() < end:
        time.sleep(0.05)
    lines = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            lines.append(" ".join(process.cmdline()))
    return lines


def _environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "OUTRIDER_CACHE": str(cache), "HOME": str(cache), "RAY_USAGE_STATS_ENABLED": "0"}
