"""A coordinator that is told to end while a stream runs: what the stream, other clients and its parent process see.

    python -m pytest tests/chaos/test_drain.py -m "chaos or long"

Each test has a coordinator of its own, between a timed stub pair whose greedy text is known on paper.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from outrider.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.e2e.processes import Part, coordinator, service, wait_for, wait_gone

pytestmark = pytest.mark.timeout(600)

GAMMA = 3
STEP_MS = 50
PRINTABLE = "".join(map(chr, range(32, 127)))
HELD_S = 55.0
"""Less than a stream of the long test takes, of which every step takes its time; the machine may add some."""


def text_after(last: str, length: int) -> str:
    """What the stub pair writes at temperature 0: the printable characters in turn."""
    start = PRINTABLE.index(last) + 1
    return "".join(PRINTABLE[(start + i) % len(PRINTABLE)] for i in range(length))


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Part, Part]]:
    folder = tmp_path_factory.mktemp("services")
    with (
        service("target_service", f"stub:markov?fixed_ms={STEP_MS}", folder / "target") as target,
        service("draft_service", "stub:perfect", folder / "draft") as draft,
    ):
        yield target, draft


@contextmanager
def door(services: tuple[Part, Part], folder: Path, *arguments: str) -> Iterator[Part]:
    """A coordinator of these services; it is killed where a test leaves it running."""
    target, draft = services
    given = ["--target", f"127.0.0.1:{target.port}", "--draft", f"127.0.0.1:{draft.port}", "--gamma", str(GAMMA)]
    with ExitStack() as stack:
        part = stack.enter_context(coordinator(folder, *given, *arguments, path="/ready"))
        wait_for(
            lambda: post(part, 1 + GAMMA)["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0, *part_of(part)
        )
        yield part


def part_of(part: Part) -> tuple[Any, Path]:
    return part.process, part.log


def body(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": "ab", "max_tokens": tokens, "temperature": 0, **fields}


def post(part: Part, tokens: int) -> Any:
    answer = httpx.post(part.url + "/v1/completions", json=body(tokens), timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


class Streaming:
    """A stream that is read in a thread; what came of it, event by event."""

    def __init__(self, part: Part, tokens: int) -> None:
        self.events: list[str] = []
        self.begun = threading.Event()
        self.torn: httpx.HTTPError | None = None
        self.began_s = time.monotonic()
        self._url = part.url + "/v1/completions"
        self._body = body(tokens, stream=True, stream_options={"include_usage": True})
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.begun.wait(60)

    def end(self) -> list[Any]:
        """All its frames, parsed, without the final `[DONE]`; it must have been neither torn nor left open."""
        self._thread.join(300)
        assert not self._thread.is_alive()
        assert self.torn is None, (self.torn, self.events[-3:])
        assert self.events[-1] == "[DONE]"
        return [json.loads(event) for event in self.events[:-1]]

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60, trust_env=False) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        self.begun.set()
        except httpx.HTTPError as error:
            self.torn = error


def assert_refuses(part: Part) -> None:
    """A drain, as others than the running stream see it."""
    wait_for(lambda: "draining for up to" in part.text(), *part_of(part))
    with httpx.Client(base_url=part.url, timeout=30, trust_env=False) as client:
        wait_for(lambda: client.get("/ready").status_code == 503, *part_of(part))
        assert client.get("/ready").json()["error"]["message"] == "draining"
        assert client.get("/health").status_code == 200
        asked_s = time.monotonic()
        for path, asked in (
            ("/v1/completions", body(8)),
            ("/v1/completions", body(8, stream=True)),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}),
        ):
            refused = client.post(path, json=asked)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["type"] == "service_unavailable_error"
            assert refused.json()["error"]["message"] == "the server is shutting down"
        assert time.monotonic() - asked_s < 10


def assert_whole(frames: list[Any], tokens: int) -> None:
    """An answer that nothing disturbed: all its text, and its usage at the end."""
    text = "".join(choice["text"] for frame in frames for choice in frame["choices"])
    assert text == text_after("b", tokens)
    reasons = [choice["finish_reason"] for frame in frames for choice in frame["choices"]]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert frames[-1]["usage"]["completion_tokens"] == tokens
    assert frames[-1]["usage"]["prompt_tokens"] == len("ab") + 1
    assert frames[-1]["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > tokens / 2


def assert_cut(frames: list[Any], tokens: int) -> None:
    """A part of the right text, then an error that names its reason."""
    text = "".join(choice["text"] for frame in frames[:-1] for choice in frame["choices"])
    assert 0 < len(text) < tokens
    assert text == text_after("b", len(text))
    error = frames[-1]["error"]
    assert (error["type"], error["message"]) == ("service_unavailable_error", "the coordinator is shutting down")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_stream_of_a_minute_ends_as_if_nothing_was(
    services: tuple[Part, Part], tmp_path: Path, number: signal.Signals
) -> None:
    """Guards long answers against a rolling restart, whatever the processes of Ray do meanwhile.

    SIGINT goes to the whole process group, as a terminal sends it.
    """
    tokens = 1_200 * (GAMMA + 1)
    with door(services, tmp_path, "--drain-seconds", "300") as part:
        family = part.family
        running = Streaming(part, tokens)
        if number == signal.SIGTERM:
            part.process.terminate()
        else:
            os.killpg(part.process.pid, number)
        assert_refuses(part)
        while time.monotonic() - running.began_s < HELD_S:
            assert part.process.poll() is None, part.text()
            time.sleep(5)
        assert_refuses(part)
        assert_whole(running.end(), tokens)
        assert time.monotonic() - running.began_s > HELD_S
        assert part.process.wait(60) == 0, part.text()
        assert wait_gone(family) == []


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_second_signal_ends_a_drain_with_an_error_frame(
    services: tuple[Part, Part], tmp_path: Path, number: signal.Signals
) -> None:
    """Guards clients against a torn stream, and operators against a drain that they cannot cut short."""
    tokens = 1_200 * (GAMMA + 1)
    with door(services, tmp_path, "--drain-seconds", "300") as part:
        family = part.family
        running = Streaming(part, tokens)
        part.process.terminate()
        assert_refuses(part)
        part.process.send_signal(number)
        sent_s = time.monotonic()
        assert_cut(running.end(), tokens)
        assert part.process.wait(60) == 130, part.text()
        assert time.monotonic() - sent_s < 30
        assert "second signal: stopping at once" in part.text()
        assert wait_gone(family) == []


@pytest.mark.chaos
def test_a_drain_that_takes_too_long_says_so(services: tuple[Part, Part], tmp_path: Path) -> None:
    """Guards whoever is still connected, running or waiting for a place, over HTTP and gRPC, when the time is over."""
    tokens = 1_200 * (GAMMA + 1)
    with door(services, tmp_path, "--drain-seconds", "2", "--max-num-seqs", "2") as part:
        family = part.family
        port = _grpc_port(part)
        running = Streaming(part, tokens)
        with grpc.insecure_channel(f"127.0.0.1:{port}", (("grpc.enable_http_proxy", 0),)) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            generating = iter(stub.Generate(_generate(tokens)))
            next(generating)
            queued: list[httpx.Response] = []
            asking = threading.Thread(target=lambda: queued.append(_ask(part)))
            asking.start()
            wait_for(lambda: _waiting(part) == 1, *part_of(part))
            part.process.terminate()
            with pytest.raises(grpc.RpcError) as ended:
                for _ in generating:
                    pass
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "shutting down" in ended.value.details()
        assert_cut(running.end(), tokens)
        asking.join(60)
        assert queued[0].status_code == 503
        assert queued[0].json()["error"]["message"] == "the server is shutting down"
        assert part.process.wait(60) == 1, part.text()
        assert "3 answers did not end within 2 s; their clients got an error" in part.text()
        assert wait_gone(family) == []


def _grpc_port(part: Part) -> int:
    found = re.search(r"gRPC port (\d+)", part.text())
    assert found is not None, part.text()
    return int(found[1])


def _generate(tokens: int) -> coordinator_pb2.GenerateRequest:
    asked = coordinator_pb2.GenerateRequest(text="ab")
    asked.params.max_tokens, asked.params.temperature = tokens, 0.0
    return asked


def _ask(part: Part) -> httpx.Response:
    return httpx.post(part.url + "/v1/completions", json=body(8), timeout=60, trust_env=False)


def _waiting(part: Part) -> float:
    text = httpx.get(part.url + "/metrics", trust_env=False).text
    line = next(line for line in text.splitlines() if line.startswith("outrider:num_requests_waiting"))
    return float(line.rpartition(" ")[2])
