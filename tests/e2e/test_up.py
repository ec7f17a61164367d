"""`outrider up` and the commands that talk to its stack, as a person types them, over stub models."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.commands import Up, outrider, relatives_gone, up
from tests.e2e.processes import WITHIN_S, answers, wait_for

TEXT = "The end."
SCRIPT = "tokens=" + ",".join(map(str, TEXT.encode())) + "&eos=257"
TARGET = f"stub:script?{SCRIPT}&fixed_ms=2"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A pair in which everything that is drafted is accepted."""
    cache = tmp_path_factory.mktemp("stack")
    with up(
        cache, "--target", TARGET, "--draft", f"stub:perfect?{SCRIPT}", "--served-model-name", "scripted"
    ) as running:
        running.wait_serving()
        yield running


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A pair whose draft process dies at its third item, again and again."""
    cache = tmp_path_factory.mktemp("dying")
    with up(cache, "--target", TARGET, "--draft", f"stub:bad?kind=die&after=3&{SCRIPT}") as running:
        running.wait_serving()
        yield running


def generate(cache: Path, *arguments: str) -> dict[str, object]:
    """What `outrider generate --json` prints."""
    done = outrider(cache, "generate", "hello", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class TestStack:
    """In this order: the last tests kill a part, and then the stack."""

    def test_status_names_parts_and_addresses(self, stack: Up) -> None:
        """Guards against a stack that can be found only by reading process lists."""
        done = outrider(stack.cache, "status")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "serving scripted" in done.stdout
        for role, port in (("target", "target-port"), ("draft", "draft-port"), ("coordinator", "port")):
            assert re.search(rf"{role} +\d+ +\S*127\.0\.0\.1:{stack.ports[port]}", done.stdout), done.stdout
        assert "'degraded': []" in done.stdout

    def test_the_coordinator_is_scheduled_like_the_services(self, stack: Up) -> None:
        """Guards every round against Ray's niceness of 15, with which a computing service would come first."""
        (replica,) = [part for part in stack.parts() if "ServeReplica" in " ".join(part.cmdline())]
        assert replica.nice() == psutil.Process(stack.process.pid).nice()

    def test_generate_prints_one_object(self, stack: Up) -> None:
        """Guards programs that read the answer, its ids and what speculation did."""
        body = generate(stack.cache)
        assert set(body) == {"text", "token_ids", "finish_reason", "usage", "metrics"}
        assert (body["text"], body["finish_reason"]) == (TEXT, "stop")
        assert body["token_ids"] == [*TEXT.encode(), 257]
        assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 9, "total_tokens": 15}
        metrics = body["metrics"]["speculative_decoding"]  # type: ignore[index]
        assert metrics["num_accepted_draft_tokens"] == metrics["num_draft_tokens"] > 0

    def test_text_without_speculation_is_the_same(self, stack: Up) -> None:
        """Guards `--no-speculation`: the same text, and nothing drafted."""
        body = generate(stack.cache, "--no-speculation")
        assert body["text"] == TEXT
        assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0  # type: ignore[index]

    def test_a_refused_parameter_is_one_line(self, stack: Up) -> None:
        """Guards against tracebacks for what the coordinator refuses; it names the field."""
        done = outrider(stack.cache, "generate", "hello", "--top-p", "2")
        assert done.returncode == 1
        assert done.stderr.startswith("outrider: ") and "top_p" in done.stderr
        assert done.stderr.count("\n") == 1

    def test_a_busy_port_names_itself(self, stack: Up, tmp_path: Path) -> None:
        """Guards against two stacks on one port, and against a failure deep inside a part."""
        done = outrider(tmp_path, "up", "--target", TARGET, "--draft", "none", "--port", str(stack.ports["port"]))
        assert done.returncode == 1
        assert done.stderr.startswith(f"outrider: port: 127.0.0.1:{stack.ports['port']} cannot be taken")
        assert "--port" in done.stderr

    def test_a_second_stack_is_refused(self, stack: Up) -> None:
        """Guards `generate` and `down` against not knowing which stack is meant."""
        done = outrider(stack.cache, "up", "--target", TARGET, "--draft", "none")
        assert done.returncode == 1
        assert f"already running (process {stack.process.pid}, {stack.url})" in done.stderr

    def test_a_killed_part_is_reported_once_and_comes_back(self, stack: Up) -> None:
        """Guards the service against the loss of a process: role, signal and log are said, the next request works."""
        (target,) = [process for process in stack.parts() if "target_service" in process.cmdline()]
        target.send_signal(signal.SIGKILL)
        stack.wait_text("target: started again", "target: ready")
        wait_for(lambda: answers(stack.url + "/ready"), stack.process, stack.log)
        assert generate(stack.cache)["text"] == TEXT
        (report,) = re.findall(r"target \(process (\d+)\) was killed by SIGKILL.*; log: (\S+)", stack.text())
        assert int(report[0]) == target.pid
        assert Path(report[1]).read_text().count("serving stub:script") == 2

    def test_down_stops_everything(self, stack: Up) -> None:
        """Guards against processes that outlive their stack; `down` returns when they are gone."""
        done = outrider(stack.cache, "down")
        assert (done.returncode, done.stdout) == (0, "stopped\n")
        assert stack.process.wait(WITHIN_S) == 0
        assert relatives_gone(stack.cache) == []
        after = outrider(stack.cache, "status")
        assert (after.returncode, "no stack is running" in after.stderr) == (1, True)
        assert outrider(stack.cache, "down").stdout == "no stack is running\n"


class TestDyingDraft:
    """In this order: the second test kills the launcher."""

    def test_text_is_right_while_the_draft_dies(self, dying: Up) -> None:
        """Guards the text against a draft process that ends in the middle of a request."""
        assert [generate(dying.cache)["text"] for _ in range(3)] == [TEXT] * 3
        dying.wait_text("draft (process")

    def test_a_killed_launcher_leaves_no_process_behind(self, dying: Up) -> None:
        """Guards against services, Ray and their memory staying after `kill -9`."""
        dying.process.send_signal(signal.SIGKILL)
        dying.process.wait()
        assert relatives_gone(dying.cache) == []


def test_ctrl_c_during_the_start_leaves_no_process_behind(tmp_path: Path) -> None:
    """Guards the hardest moment: Ray's processes are coming up and nobody has counted them yet."""
    with up(tmp_path, "--target", TARGET, "--draft", "ngram") as starting:
        wait_for(
            lambda: any(process.name() == "gcs_server" for process in starting.parts()), starting.process, starting.log
        )
        starting.process.send_signal(signal.SIGINT)
        assert starting.process.wait(WITHIN_S) == 0
        assert starting.text().endswith("stopped\n")
        assert relatives_gone(tmp_path) == []


def test_a_bad_model_path_stops_the_start(tmp_path: Path) -> None:
    """Guards against a half-started stack, and against a traceback instead of a reason."""
    done = outrider(tmp_path, "up", "--target", "./no/such/model", "--draft", "none")
    assert done.returncode == 1
    assert done.stderr.startswith("outrider: no/such/model is not a folder")
    assert done.stderr.count("\n") == 1
    assert relatives_gone(tmp_path) == []
