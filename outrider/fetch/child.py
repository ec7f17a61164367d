"""A worker process that cannot outlive its parent: pip, the hub download, the conversion."""

from __future__ import annotations

import ctypes
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

_PR_SET_PDEATHSIG = 1
_TICK_S = 1.0
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Finished(NamedTuple):
    """How a worker ended."""

    returncode: int
    stderr: str

    @property
    def last_line(self) -> str:
        """The last non-empty line of stderr, which is where Python and pip put the reason."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {self.returncode}"


def run(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None],
    on_tick: Callable[[], None] = lambda: None,
) -> Finished:
    """Run `arguments` to their end, handing over each line of stdout, and ticking once a second in between.

    Whatever ends the wait (Ctrl-C included) kills the worker first. If this process is killed outright, Linux ends
    the worker with it.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        process = subprocess.Popen(
            arguments,
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C in the terminal is ours to handle, not the worker's
            preexec_fn=_die_with_parent,
        )
        assert process.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
        try:
            _follow(lines, on_line, on_tick)
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        stderr.seek(0)
        return Finished(process.returncode, stderr.read())


def _follow(lines: queue.SimpleQueue[str | None], on_line: Callable[[str], None], on_tick: Callable[[], None]) -> None:
    while True:
        try:
            line = lines.get(timeout=_TICK_S)
        except queue.Empty:
            on_tick()
            continue
        if line is None:
            return
        on_line(line)


def _pump(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
