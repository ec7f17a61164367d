"""Starts the parts as child processes, shows how far each is, reports the one that dies, and stops them together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider import phases
from outrider.errors import Unavailable

HEARTBEAT_S = 3.0
"""With the time that asking all parts may take, no phase is silent for more than 5 s."""
_FIRST_RESTART_S = 0.5
_LAST_RESTART_S = 30.0
_STABLE_S = 60.0
"""A part that lived this long starts its restart back-off anew."""
_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class PartSpec:
    """How to run one part.

    Attributes:
        ready: asked about once a poll after start; True when the part serves.
    """

    role: str
    module: str
    arguments: tuple[str, ...]
    ready: Callable[[], bool]
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] | None = None


class _Part:
    """One child process and its log."""

    def __init__(self, spec: PartSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.phase = "start"
        self.is_ready = False
        self.restart_at: float | None = None
        self.backoff_s = _FIRST_RESTART_S
        self._read_from = 0
        self.start()

    def start(self) -> None:
        cpus = "all" if self.spec.cpus is None else ",".join(map(str, self.spec.cpus))
        command = [sys.executable, "-m", "outrider.local.child", str(os.getpid()), cpus, self.spec.module]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.spec.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.spec.environment},
                start_new_session=True,  # Ctrl-C reaches only the launcher, which then stops the parts in order
            )
        self.started_s = time.monotonic()
        self.shown_s = self.started_s
        self.is_ready = False
        self.restart_at = None
        self.phase = "start"

    def new_phases(self) -> list[tuple[str, str]]:
        """Phases announced since the last call."""
        with open(self.log, "rb") as log:
            log.seek(self._read_from)
            data = log.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._read_from += len(complete)
        found = [phases.parse(line) for line in complete.decode("utf-8", "replace").splitlines()]
        return [phase for phase in found if phase]

    def tail(self) -> str:
        lines = self.log.read_text("utf-8", "replace").splitlines()
        shown = [line for line in lines if line.strip() and phases.parse(line) is None][-_TAIL_LINES:]
        return "\n".join(f"    | {line}" for line in shown)

    def death(self) -> str | None:
        """How the process ended, or None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class Supervisor:
    """The parts of one stack, children of this process.

    The process that creates it must call every method from one thread: a child dies with the thread that started it.
    """

    def __init__(self, specs: Sequence[PartSpec], logs: Path, say: Callable[[str], None]) -> None:
        self._say = say
        self._began_s = time.monotonic()
        logs.mkdir(parents=True, exist_ok=True)
        self._stopping = False
        self._parts = [_Part(spec, logs / f"{spec.role}.log") for spec in specs]

    @property
    def process_ids(self) -> dict[str, int]:
        return {part.spec.role: part.process.pid for part in self._parts}

    def wait_ready(self, timeout_s: float) -> None:
        """Show the phases until every part serves.

        Raises:
            Unavailable: a part died or the time ran out; the message holds the part's last lines and its log's path.
        """
        while not all(part.is_ready for part in self._parts):
            for part in self._parts:
                self._show_progress(part)
                death = part.death()
                if death:
                    raise Unavailable(self._obituary(part, f"{death} before it was ready"))
                if not part.is_ready and part.spec.ready():
                    part.is_ready = True
                    self._say(f"{self._clock()} {part.spec.role}: ready")
            if time.monotonic() - self._began_s > timeout_s:
                late = next(part for part in self._parts if not part.is_ready)
                raise Unavailable(self._obituary(late, f"is not ready after {timeout_s:g} s (phase {late.phase})"))
            time.sleep(0.1)

    def watch(self) -> None:
        """One look at the parts: report a death once, start the part again after a growing pause."""
        now = time.monotonic()
        for part in self._parts:
            if part.restart_at is not None:
                if now >= part.restart_at:
                    part.start()
                    self._say(f"{part.spec.role}: started again (process {part.process.pid})")
                continue
            death = part.death()
            if death is None:
                if not part.is_ready and part.spec.ready():
                    part.is_ready = True
                    self._say(f"{part.spec.role}: ready")
                continue
            if now - part.started_s > _STABLE_S:
                part.backoff_s = _FIRST_RESTART_S
            part.restart_at = now + part.backoff_s
            self._say(self._obituary(part, f"{death}; it is started again in {part.backoff_s:g} s"))
            part.backoff_s = min(2 * part.backoff_s, _LAST_RESTART_S)

    def stop(self, grace_s: float) -> None:
        """Drain all parts, the front door first; what is left after `grace_s` seconds is killed. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        end = time.monotonic() + grace_s
        for part in reversed(self._parts):
            if part.process.poll() is None:
                part.process.terminate()
            if part.spec.role == "coordinator":
                _wait(part.process, end)  # its streams end before the services beneath them do
        for part in self._parts:
            _wait(part.process, end)

    def kill(self) -> None:
        """Stop at once."""
        self._stopping = True
        for part in self._parts:
            _kill_group(part.process)

    def _show_progress(self, part: _Part) -> None:
        now = time.monotonic()
        for phase, detail in part.new_phases():
            part.phase, part.shown_s = phase, now
            if phase != "ready":
                self._say(f"{self._clock()} {part.spec.role}: {phase}" + (f" ({detail})" if detail else ""))
        if not part.is_ready and now - part.shown_s >= HEARTBEAT_S:
            part.shown_s = now
            self._say(f"{self._clock()} {part.spec.role}: still in phase {part.phase}")

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began_s:5.1f} s"

    def _obituary(self, part: _Part, what: str) -> str:
        return f"{part.spec.role} (process {part.process.pid}) {what}; log: {part.log}\n{part.tail()}"


def _wait(process: subprocess.Popen[bytes], end: float) -> None:
    try:
        process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Each part leads a process group of its own, so this reaches nothing else."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
