"""`outrider up` and the commands that talk to it, as a user runs them, with stub models."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from outrider.local.state import StackState, read, state_file

WITHIN_S = 90.0
"""How long anything may take on a loaded machine."""


@dataclass(frozen=True, slots=True)
class Up:
    """A running `outrider up`."""

    process: subprocess.Popen[bytes]
    cache: Path
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def state(self) -> StackState:
        state = read(state_file(self.cache))
        assert state is not None, self.text
        return state


def outrider(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from outrider.cli import main; main()", *arguments],
        env={**os.environ, "OUTRIDER_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )


def start(cache: Path, *arguments: str) -> Up:
    """Starts `outrider up` on free ports and waits until it serves."""
    cache.mkdir(parents=True, exist_ok=True)
    log = cache / "up.log"
    ports = free_ports(4)
    flags = ["--port", "--grpc-port", "--draft-port", "--target-port"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from outrider.cli import main; main()", "up", *arguments),
                *(text for pair in zip(flags, map(str, ports), strict=True) for text in pair),
            ],
            env={**os.environ, "OUTRIDER_CACHE": str(cache), "PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=file,
        )
    up = Up(process, cache, log)
    until(lambda: "serving" in up.text or process.poll() is not None, up)
    assert process.poll() is None, up.text
    return up


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def until(condition: Callable[[], bool], up: Up) -> None:
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end, up.text
        time.sleep(0.1)


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack whose draft dies after six proposals, and again each time it has come back."""
    cache = tmp_path_factory.mktemp("up")
    running = start(cache, "--target", "stub:markov", "--draft", "stub:bad?kind=die&after=6")
    yield running
    outrider(cache, "down")
    running.process.kill()
    running.process.wait()


def test_generate_answers_with_and_without_speculation(up: Up) -> None:
    """Guards the command a user tries first, and the promise of equal text."""
    plain = outrider(up.cache, "generate", "abc", "--max-tokens", "12", "--temperature", "0", "--no-speculation")
    assert plain.stdout.rstrip("\n") == "defghijklmno", plain.stderr
    answer = json.loads(
        outrider(up.cache, "generate", "abc", "--max-tokens", "12", "--temperature", "0", "--json").stdout
    )
    assert list(answer) == ["text", "token_ids", "finish_reason", "usage", "metrics"]
    assert answer["text"] == "defghijklmno"
    assert answer["token_ids"] == list(b"defghijklmno")
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}, "BOS counts"


def test_a_draft_that_dies_again_and_again_costs_no_text(up: Up) -> None:
    """Guards the promise of the whole: each death is reported with its signal and log, none is noticed in an answer."""
    for _ in range(4):
        answer = outrider(up.cache, "generate", "abc", "--max-tokens", "60", "--temperature", "0", "--json")
        assert json.loads(answer.stdout)["text"] == "".join(chr(100 + i) for i in range(27)) + "".join(
            chr(32 + i) for i in range(33)
        )
    until(lambda: "draft: ready" in up.text.split("was killed by SIGKILL", 1)[-1], up)
    deaths = re.findall(r"draft \(process (\d+)\) was killed by SIGKILL.*log: (\S+)", up.text)
    assert deaths and all(Path(log).is_file() for _, log in deaths)
    assert len({pid for pid, _ in deaths}) == len(deaths), "each death is told once"


def test_a_killed_target_comes_back_and_answers(up: Up) -> None:
    """Guards the restart of the part that nothing works without."""
    os.kill(up.state.parts["target"], signal.SIGKILL)
    until(lambda: "target: started again" in up.text, up)
    until(lambda: outrider(up.cache, "status").returncode == 0, up)
    answer = outrider(up.cache, "generate", "abc", "--max-tokens", "3", "--temperature", "0", "--json")
    assert json.loads(answer.stdout)["text"] == "def", answer.stderr


def test_status_names_the_parts(up: Up) -> None:
    """Guards the operator's first question."""
    shown = outrider(up.cache, "status")
    assert shown.returncode == 0, shown.stderr
    assert all(word in shown.stdout for word in ("stub:markov", "target", "draft", "coordinator", "degraded"))


def test_a_second_stack_is_refused(up: Up) -> None:
    """Guards against two stacks of one user that `down` cannot tell apart."""
    second = outrider(up.cache, "up", "--target", "stub:markov", "--draft", "none")
    assert second.returncode == 1
    assert "already running" in second.stderr and "outrider down" in second.stderr


def test_a_busy_port_is_named(up: Up, tmp_path: Path) -> None:
    """Guards against a start that fails late, or that shares a port in silence."""
    port = up.state.http.rsplit(":", 1)[1]
    busy = outrider(tmp_path, "up", "--target", "stub:markov", "--draft", "none", "--port", port)
    assert busy.returncode == 1
    assert f"127.0.0.1:{port}" in busy.stderr and "--port" in busy.stderr


def test_a_model_that_is_not_there_stops_the_start_in_one_line(tmp_path: Path) -> None:
    """Guards against tracebacks and against a stack that waits for a model that will never load."""
    failed = outrider(tmp_path, "up", "--target", "./nowhere", "--draft", "none")
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1 and "nowhere is not a folder" in failed.stderr


def test_down_stops_every_process(up: Up) -> None:
    """Guards the orderly end; the last test that uses the stack."""
    processes = family(up.process.pid)
    stopped = outrider(up.cache, "down")
    assert "stopped" in stopped.stdout, stopped.stderr
    until(lambda: gone(processes), up)
    assert up.process.wait(WITHIN_S) == 0
    assert "no stack is running" in outrider(up.cache, "down").stdout


def test_kill_9_leaves_no_process(tmp_path: Path) -> None:
    """Guards against orphans that hold ports, cards and memory."""
    running = start(tmp_path, "--target", "stub:markov", "--draft", "none")
    processes = family(running.process.pid)
    assert len(processes) >= 3
    running.process.kill()
    running.process.wait()
    until(lambda: gone(processes), running)
