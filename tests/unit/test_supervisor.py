"""Child processes: started, shown, reported when they die, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from outrider.errors import Unavailable
from outrider.local.state import StackState, held, read, stop
from outrider.local.supervisor import PartSpec, Supervisor


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Makes a part from Python source; it is ready when the file `ready` exists."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")

    def make(source: str, *, role: str = "target") -> PartSpec:
        (tmp_path / f"{role}_part.py").write_text(textwrap.dedent(source))
        return PartSpec(role, f"{role}_part", (), lambda: (tmp_path / "ready").exists())

    return make


def until(condition, what: str, timeout_s: float = 20.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.02)


SERVES = """
    import pathlib, sys, time
    print("phase: load (some weights)", file=sys.stderr, flush=True)
    pathlib.Path(__file__).with_name("ready").touch()
    time.sleep(600)
"""


def test_phases_are_shown_and_readiness_is_waited_for(tmp_path: Path, part) -> None:  # type: ignore[no-untyped-def]
    """Guards against a silent start-up."""
    said: list[str] = []
    supervisor = Supervisor([part(SERVES)], tmp_path / "logs", said.append)
    try:
        supervisor.wait_ready(30.0)
    finally:
        supervisor.kill()
    assert any("target: load (some weights)" in line for line in said)
    assert any(line.endswith("target: ready") for line in said)


def test_a_part_that_dies_before_it_serves_stops_the_start_with_its_last_lines(tmp_path: Path, part) -> None:  # type: ignore[no-untyped-def]
    """Guards against a start that waits for a dead process, and against an error without its reason."""
    supervisor = Supervisor([part('raise SystemExit("no such model")')], tmp_path / "logs", lambda _: None)
    with pytest.raises(Unavailable, match=r"(?s)target .*exit code 1 before it was ready; log: .*no such model"):
        supervisor.wait_ready(30.0)


def test_a_death_is_reported_once_with_its_signal_and_the_part_comes_back(tmp_path: Path, part) -> None:  # type: ignore[no-untyped-def]
    """Guards the report and the restart of a part that is killed while serving."""
    said: list[str] = []
    supervisor = Supervisor([part(SERVES)], tmp_path / "logs", said.append)
    try:
        supervisor.wait_ready(30.0)
        first = supervisor.process_ids["target"]
        os.kill(first, signal.SIGKILL)

        def back() -> bool:
            supervisor.watch()
            return supervisor.process_ids["target"] != first

        until(back, "restarted")
        obituaries = [line for line in said if "was killed by SIGKILL" in line]
        assert len(obituaries) == 1 and "target.log" in obituaries[0]
    finally:
        supervisor.kill()


def test_stop_drains_and_leaves_no_process(tmp_path: Path, part) -> None:  # type: ignore[no-untyped-def]
    """Guards the orderly end: SIGTERM first, and a part that ignores it is killed after the grace."""
    deaf = SERVES.replace("time.sleep(600)", "import signal; signal.signal(15, signal.SIG_IGN); time.sleep(600)")
    supervisor = Supervisor([part(SERVES), part(deaf, role="draft")], tmp_path / "logs", lambda _: None)
    supervisor.wait_ready(30.0)
    pids = supervisor.process_ids.values()
    supervisor.stop(0.5)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_parts_die_with_a_launcher_that_is_killed(tmp_path: Path, part) -> None:  # type: ignore[no-untyped-def]
    """Guards `kill -9` of `outrider up`: no process stays behind."""
    part(SERVES)
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        textwrap.dedent(f"""
        import pathlib, time
        from outrider.local.supervisor import PartSpec, Supervisor
        here = pathlib.Path({str(tmp_path)!r})
        s = Supervisor([PartSpec("target", "target_part", (), (here / "ready").exists)], here / "logs", lambda _: None)
        s.wait_ready(30)
        print(s.process_ids["target"], flush=True)
        time.sleep(600)
        """)
    )
    with subprocess.Popen([sys.executable, str(launcher)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
    until(lambda: not psutil.pid_exists(child), "the part died")


def state(pid: int) -> StackState:
    return StackState(pid, "http://127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", None, "m", "logs", {"target": 1})


def test_a_second_stack_is_refused_and_a_stale_file_means_nothing(tmp_path: Path) -> None:
    """Guards `status` and `down` against a file that a killed stack left, and two stacks against each other."""
    path = tmp_path / "run" / "stack.json"
    with held(path) as holder:
        holder.write(state(os.getpid()))
        assert read(path) == state(os.getpid())
        with pytest.raises(Unavailable, match="already running"), held(path):
            pass
    path.write_text('{"pid": 1}')
    assert read(path) is None
    assert stop(path, 1.0) is False
