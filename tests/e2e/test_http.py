"""The HTTP door as its users meet it: OpenAI's own client, Ray Serve, and real services with stub models behind."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from outrider.v1 import common_pb2, target_pb2_grpc
from tests.e2e.processes import WITHIN_S, Part, coordinator, is_whole, service, wait_for

TEXT = "Hé😀 the end"
SCRIPT = "tokens=" + ",".join(map(str, TEXT.encode())) + "&eos=257"
SERVED = "scripted"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@dataclass
class Stack:
    """Three parts that serve."""

    target: Part
    draft: Part
    coordinator: Part
    client: openai.OpenAI

    def open_streams(self) -> int:
        """Streams that the target holds."""
        with grpc.insecure_channel(f"127.0.0.1:{self.target.port}", (("grpc.enable_http_proxy", 0),)) as channel:
            answer = target_pb2_grpc.TargetServiceStub(channel).GetInfo(common_pb2.GetInfoRequest())
        return int(answer.info.open_streams)

    def wait_streams(self, number: int) -> None:
        end = time.monotonic() + WITHIN_S
        while self.open_streams() != number:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A step of the target takes 5 ms, so that there is time to go away in the middle of an answer."""
    folder = tmp_path_factory.mktemp("stack")
    with ExitStack() as parts:
        target = parts.enter_context(service("target_service", f"stub:script?{SCRIPT}&fixed_ms=5", folder / "target"))
        draft = parts.enter_context(service("draft_service", f"stub:perfect?{SCRIPT}", folder / "draft"))
        addresses = ["--target", f"127.0.0.1:{target.port}", "--draft", f"127.0.0.1:{draft.port}"]
        options = ["--served-model-name", SERVED, "--num-speculative-tokens", "3"]
        door = parts.enter_context(coordinator(folder / "door", *addresses, *options, path="/ready"))
        wait_for(lambda: is_whole(door.url), door.process, door.log)
        http = httpx.Client(trust_env=False)
        client = openai.OpenAI(base_url=door.url + "/v1", api_key="none", http_client=http, max_retries=0)
        yield Stack(target, draft, door, client)


def test_a_completion_comes_back_with_what_speculation_did(stack: Stack) -> None:
    """Guards the official client against our objects."""
    answer = stack.client.completions.create(model=SERVED, prompt="hi", max_tokens=64, temperature=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (TEXT, "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(TEXT.encode()) + 1
    metrics = answer.metrics["speculative_decoding"]  # type: ignore[attr-defined]  # vLLM's extension
    assert metrics["num_accepted_draft_tokens"] == metrics["num_draft_tokens"] > 0


def test_streams_give_the_same_text(stack: Stack) -> None:
    """Guards both kinds of stream, with usage at their end."""
    text, usage = "", None
    for part in stack.client.completions.create(
        model=SERVED, prompt="hi", max_tokens=64, stream=True, stream_options={"include_usage": True}
    ):
        text += part.choices[0].text if part.choices else ""
        usage = part.usage or usage
    assert text == TEXT
    assert usage is not None
    assert usage.completion_tokens == len(TEXT.encode()) + 1
    deltas = [
        part.choices[0].delta.content
        for part in stack.client.chat.completions.create(model=SERVED, messages=MESSAGES, stream=True)
    ]
    assert "".join(delta or "" for delta in deltas) == TEXT
    assert 1 < len(deltas) < len(TEXT.encode())


def test_log_probabilities_reach_the_official_client(stack: Stack) -> None:
    """Guards both forms, whole and streamed: one entry per token, and the pieces of a stream make the whole."""
    wanted: Any = {"model": SERVED, "prompt": "hi", "max_tokens": 64, "temperature": 0, "logprobs": 1, "echo": True}
    whole = stack.client.completions.create(**wanted)
    scores = whole.choices[0].logprobs
    assert scores is not None and scores.token_logprobs is not None and scores.text_offset is not None
    assert whole.choices[0].text == "hi" + TEXT
    assert len(scores.token_logprobs) == len(scores.text_offset) == 3 + len(TEXT.encode()) + 1
    assert scores.token_logprobs[0] is None and scores.token_logprobs[3:] == [0.0] * (len(TEXT.encode()) + 1)
    parts = [part.choices[0] for part in stack.client.completions.create(**wanted, stream=True)]
    assert [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs or ()] == (
        scores.token_logprobs
    )
    chat: Any = {"model": SERVED, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "temperature": 0}
    content = stack.client.chat.completions.create(**chat).choices[0].logprobs
    assert content is not None and content.content is not None
    assert bytes(byte for entry in content.content[:-1] for byte in entry.bytes or ()).decode() == TEXT
    assert {len(entry.top_logprobs) for entry in content.content} == {2}
    chunks = [part.choices[0].logprobs for part in stack.client.chat.completions.create(**chat, stream=True)]
    assert [entry for chunk in chunks if chunk for entry in chunk.content or ()] == content.content


def test_a_chat_stops_where_it_is_told(stack: Stack) -> None:
    """Guards stop strings over the whole path."""
    answer = stack.client.chat.completions.create(model=SERVED, messages=MESSAGES, stop=["the"])
    assert answer.choices[0].message.content == "Hé😀 "
    assert answer.choices[0].finish_reason == "stop"


def test_errors_arrive_as_the_client_s_own_exceptions(stack: Stack) -> None:
    """Guards status, body and parameter of refusals; the next good request works."""
    with pytest.raises(openai.BadRequestError) as bad:
        stack.client.completions.create(model=SERVED, prompt="hi", max_tokens=0)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        stack.client.completions.create(model="another", prompt="hi")
    assert missing.value.code == "model_not_found"
    assert [model.id for model in stack.client.models.list()] == [SERVED]
    assert stack.client.completions.create(model=SERVED, prompt="hi").choices[0].text


def test_many_clients_are_served_at_once(stack: Stack) -> None:
    """Guards against Serve's own limit of five requests at a time."""

    def ask(_: int) -> str:
        return stack.client.completions.create(model=SERVED, prompt="hi", max_tokens=64).choices[0].text

    with ThreadPoolExecutor(40) as pool:
        assert set(pool.map(ask, range(40))) == {TEXT}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_the_target(stack: Stack, stream: bool) -> None:
    """Guards the services' memory against answers that nobody reads."""
    body = {"prompt": "hi", "max_tokens": 8000, "ignore_eos": True, "stream": stream}
    with httpx.Client(trust_env=False, timeout=WITHIN_S) as client:
        gone = threading.Event()

        def ask() -> None:
            try:
                client.post(stack.coordinator.url + "/v1/completions", json=body)
            except httpx.HTTPError:
                gone.set()

        asking = threading.Thread(target=ask)
        asking.start()
        stack.wait_streams(1)
        # Closing the socket under the waiting call is what a killed client looks like.
        for connection in client._transport._pool.connections:  # type: ignore[attr-defined]
            connection._connection._network_stream._sock.shutdown(2)
        asking.join(WITHIN_S)
        assert gone.is_set()
    stack.wait_streams(0)


def test_readiness_and_metrics_are_served(stack: Stack) -> None:
    """Guards probes and scrapes."""

    def ready() -> dict[str, Any]:
        return httpx.get(stack.coordinator.url + "/ready", trust_env=False).json()  # type: ignore[no-any-return]

    # On a busy machine the draft may have been late a moment ago; it is taken back by itself.
    wait_for(lambda: ready()["degraded"] == [], stack.coordinator.process, stack.coordinator.log)
    assert ready()["last_step_age_s"] >= 0
    text = httpx.get(stack.coordinator.url + "/metrics", trust_env=False).text
    assert "outrider:spec_decode_num_accepted_tokens_total" in text


def test_a_dead_draft_costs_speed_and_nothing_else(stack: Stack) -> None:
    """Guards against an outage, or another text, because the draft died; it is named as degraded."""
    stack.draft.process.send_signal(signal.SIGKILL)
    stack.draft.process.wait()
    answer = stack.client.completions.create(model=SERVED, prompt="hi", max_tokens=64)
    assert answer.choices[0].text == TEXT
    ready = httpx.get(stack.coordinator.url + "/ready", trust_env=False)
    assert ready.status_code == 200
    assert [part["part"] for part in ready.json()["degraded"]] == ["draft"]


def test_a_running_answer_outlives_sigterm(stack: Stack) -> None:
    """Guards answers against a rolling restart: new ones are refused, the running one ends as if nothing was."""
    tokens = 600
    stream = stack.client.completions.create(
        model=SERVED,
        prompt="hi",
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    parts = iter(stream)
    got = [next(parts)]
    stack.coordinator.process.terminate()
    with httpx.Client(base_url=stack.coordinator.url, trust_env=False, timeout=WITHIN_S) as client:
        while client.get("/ready").status_code == 200:
            pass
        with pytest.raises(openai.InternalServerError, match="the server is shutting down") as refused:
            stack.client.completions.create(model=SERVED, prompt="hi")
        assert refused.value.status_code == 503
        assert client.get("/health").status_code == 200
    got += parts
    text = "".join(part.choices[0].text for part in got if part.choices)
    assert text == TEXT + "<eos>" * (tokens - len(TEXT.encode()))
    assert [part.choices[0].finish_reason for part in got if part.choices][-1] == "length"
    assert got[-1].usage is not None and got[-1].usage.completion_tokens == tokens
    assert stack.coordinator.process.wait(WITHIN_S) == 0, Path(stack.coordinator.log).read_text()
