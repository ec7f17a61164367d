"""What `outrider up` leaves for `generate`, `status` and `down` to find: one locked file while it runs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.errors import Unavailable


@dataclass(frozen=True, slots=True)
class StackState:
    """A running stack: process id of its `up`, addresses by part, process ids by part, folder of its logs.

    Attributes:
        certfile, keyfile: of the API's TLS, or None for plain text.
    """

    pid: int
    http: str
    grpc: str
    target: str
    draft: str | None
    model: str
    logs: str
    parts: Mapping[str, int]
    certfile: str | None = None
    keyfile: str | None = None


def state_file(cache: Path) -> Path:
    return cache / "run" / "stack.json"


@contextmanager
def held(path: Path) -> Iterator[StateHolder]:
    """Own the state file while the stack runs; the lock, not the file's existence, says that a stack is alive.

    Raises:
        Unavailable: another stack of this user runs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            running = read(path)
            raise Unavailable(
                f"a stack is already running (process {running.pid}, {running.http}); stop it with `outrider down`"
                if running
                else "a stack is already starting; wait for it or stop it"
            ) from None
        try:
            yield StateHolder(path)
        finally:
            path.write_text("", encoding="utf-8")


class StateHolder:
    """Writes the state of the stack that holds the lock."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, state: StackState) -> None:
        self._path.write_text(json.dumps(asdict(state)), encoding="utf-8")


def read(path: Path) -> StackState | None:
    """The running stack, or None where no process holds the lock."""
    if not path.exists() or not _is_locked(path):
        return None
    text = path.read_text(encoding="utf-8")
    return StackState(**json.loads(text)) if text else None


def stop(path: Path, timeout_s: float) -> bool:
    """Ask the running stack to stop and wait until it has; False where none runs.

    Raises:
        Unavailable: it did not stop in time.
    """
    state = read(path)
    if state is None:
        return False
    os.kill(state.pid, signal.SIGTERM)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if not _is_locked(path):
            return True
        time.sleep(0.1)
    raise Unavailable(f"process {state.pid} did not stop within {timeout_s:g} s; its logs are in {state.logs}")


def _is_locked(path: Path) -> bool:
    with open(path, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
