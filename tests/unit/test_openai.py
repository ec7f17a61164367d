"""The HTTP door, against a scripted decoder and without sockets."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator import reply
from coordinator.app import build_app
from coordinator.fields import FIELDS
from coordinator.front import Front, FrontConfig
from coordinator.parts import Degraded
from coordinator.prepare import Policy
from coordinator.served import COMPLETION_MAX_TOKENS, Defaults
from outrider.errors import DeadlineExceeded, NonFiniteLogits
from outrider.planted import Plant
from outrider.sampling import Rule
from tests.scripted_decoder import EOS, MAX_MODEL_LEN, MODEL, ScriptedDecoder, http_client, part_info, running_front

GOOD = {"model": MODEL, "prompt": "hi"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def complete(decoder: ScriptedDecoder, config: FrontConfig | None = None, **fields: Any) -> httpx.Response:
    """One completion; `messages` makes it a chat."""
    async with http_client(decoder, config) as client:
        if "messages" in fields:
            return await client.post("/v1/chat/completions", json={"model": MODEL, **fields})
        return await client.post("/v1/completions", json={**GOOD, **fields})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON objects of an event stream, which must end with the end mark."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ---- shape ----


async def test_a_completion_has_text_usage_and_what_speculation_did() -> None:
    """Guards the object that every client reads."""
    response = await complete(ScriptedDecoder(round_size=3), max_tokens=8)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    assert body["system_fingerprint"].startswith("fp_")
    assert body["choices"] == [
        {"index": 0, "text": "abcdefgh", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert body["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 5 / 3,
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, 1, 2],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 5,
        "rule": "standard",
    }


async def test_a_chat_completion_has_a_message() -> None:
    """Guards the other object."""
    body = (await complete(ScriptedDecoder(), **CHAT, max_tokens=2)).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert body["usage"]["prompt_tokens"] == len(b"user: hi\nassistant: ") + 1


@pytest.mark.parametrize("round_size", [1, 2, 5])
@pytest.mark.parametrize("stop", [None, "fg", ["ef", "cde"]])
async def test_a_stream_carries_the_text_and_usage_of_the_whole_answer(round_size: int, stop: Any) -> None:
    """Guards against holes, repeats, leaked stop strings, and usage that counts past the stop."""
    script = "aé😀bcdefgh".encode()
    fields = {"max_tokens": 14, "stop": stop}
    whole = (await complete(ScriptedDecoder(script, round_size), **fields)).json()
    response = await complete(
        ScriptedDecoder(script, round_size), **fields, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = events(response)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == whole["choices"][0]["finish_reason"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert (last["usage"], last["metrics"]) == (whole["usage"], whole["metrics"])


async def test_all_tokens_of_a_round_come_in_one_frame() -> None:
    """Guards against a frame per token, which costs the coordinator what speculation gains."""
    chunks = events(await complete(ScriptedDecoder(round_size=4), max_tokens=8, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["abcd", "efgh"]


async def test_a_chat_stream_names_the_role_once() -> None:
    """Guards clients that join deltas."""
    chunks = events(await complete(ScriptedDecoder(round_size=1), **CHAT, max_tokens=2, stream=True))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "a"},
        {"content": "b"},
    ]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_token_ids_are_returned_on_request() -> None:
    """Guards tools that compare ids, streaming and not."""
    whole = (await complete(ScriptedDecoder(round_size=2), max_tokens=3, return_token_ids=True)).json()["choices"][0]
    assert (whole["token_ids"], whole["drafted"]) == ([97, 98, 99], [True, False, False])
    assert whole["prompt_token_ids"] == [256, 104, 105]
    response = await complete(ScriptedDecoder(round_size=2), max_tokens=3, return_token_ids=True, stream=True)
    choices = [chunk["choices"][0] for chunk in events(response)]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]


async def test_min_tokens_beyond_the_room_names_the_room() -> None:
    """Guards a message that names a number the client never sent."""
    prompt = [97] * (MAX_MODEL_LEN - 5)
    response = await complete(ScriptedDecoder(), prompt=prompt, max_tokens=50, min_tokens=10)
    assert response.status_code == 400
    assert "min_tokens must be at most 5" in response.json()["error"]["message"].replace("min_tokens: ", "min_tokens ")


@pytest.mark.parametrize("asked", [10**8, 2**31, 2**63])
async def test_more_tokens_than_there_is_room_end_with_the_room(asked: int) -> None:
    """Guards large values against a hang, a crash and an empty answer."""
    prompt = [97] * (MAX_MODEL_LEN - 5)
    response = await complete(ScriptedDecoder(), prompt=prompt, max_tokens=asked)
    assert response.status_code == 200
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 5


async def test_too_many_log_probabilities_of_prompts_are_refused() -> None:
    """Guards memory and every other answer: tokens x alternatives x n of long prompts come to gigabytes of JSON."""
    prompts = [[97] * (MAX_MODEL_LEN - 5)] * 16
    response = await complete(ScriptedDecoder(), prompt=prompts, prompt_logprobs=20, n=16, max_tokens=1)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prompt_logprobs" and "tokens x alternatives x n" in error["message"]


async def test_several_answers_are_told_apart() -> None:
    """Guards `n`: each answer has an index and noise of its own, and all are counted."""
    decoder = ScriptedDecoder()
    body = (await complete(decoder, n=3, max_tokens=4, seed=1)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in body["choices"]] == ["abcd"] * 3
    assert body["usage"]["completion_tokens"] == 12
    assert [stream.request.sample_index for stream in decoder.streams] == [0, 1, 2]
    chunks = events(await complete(ScriptedDecoder(), n=2, max_tokens=4, stream=True))
    texts = dict.fromkeys((0, 1), "")
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "abcd", 1: "abcd"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_named_as_its_client_named_it(stream: bool) -> None:
    """Guards tracing: header and body carry the client's id, or a new one where it is unfit for a header."""
    async with http_client(ScriptedDecoder()) as client:
        body = {**GOOD, "stream": stream}
        response = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "trace-7"})
        assert response.headers["x-request-id"] == "trace-7"
        assert '"id":"cmpl-trace-7"' in response.text
        for odd in ({}, {"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 129}):
            other = await client.post("/v1/completions", json=body, headers=odd)
            assert len(other.headers["x-request-id"]) == 32
        wrong = {**body, "model": "other"}
        refused = await client.post("/v1/completions", json=wrong, headers={"X-Request-Id": "t"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (404, "t")


async def test_a_stream_that_waits_is_kept_alive_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards long queues against clients that give up on a silent connection; what fails behind a ping is a frame."""
    monkeypatch.setattr(reply, "PING_S", 0.1)
    decoder = ScriptedDecoder()
    decoder.gate = asyncio.Event()
    decoder.error, decoder.error_after = DeadlineExceeded("too late"), 3
    async with http_client(decoder) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={**GOOD, "stream": True, "max_tokens": 9}))
        await asyncio.sleep(0.35)
        decoder.gate.set()
        response = await asking
        whole = await client.post("/v1/completions", json={**GOOD, "max_tokens": 1})
    frames = response.text.split("\n\n")
    assert frames[0] == ": ping" and frames.count(": ping") >= 2
    assert [frame[:6] for frame in frames if frame and frame != ": ping"] == ["data: "] * 3
    assert "too late" in frames[-3] and response.status_code == 200
    assert whole.json()["choices"][0]["text"] == "a"


# ---- ends ----


@pytest.mark.parametrize(
    ("fields", "text", "reason", "why"),
    [
        ({"stop": "cd"}, "ab", "stop", "cd"),
        ({"stop": ["zz", "e"]}, "abcd", "stop", "e"),
        ({"stop": "cd", "include_stop_str_in_output": True}, "abcd", "stop", "cd"),
        ({"stop_token_ids": [101]}, "abcd", "stop", 101),
        ({"stop": ["<eos>"]}, "abcdefgh", "stop", None),
        ({}, "abcdefgh", "stop", None),
        ({"ignore_eos": True, "max_tokens": 10}, "abcdefgha", "length", None),
        ({"ignore_eos": True, "max_tokens": 9, "skip_special_tokens": False}, "abcdefgh<eos>", "length", None),
    ],
)
async def test_an_answer_says_where_and_why_it_ended(fields: Any, text: str, reason: str, why: Any) -> None:
    """Guards the text, the reason and the cause of every kind of end."""
    script = [*b"abcdefgh", EOS]
    choice = (await complete(ScriptedDecoder(script, 4), **fields)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, why)


async def test_the_decoder_is_told_of_a_stop_string_so_that_it_ends() -> None:
    """Guards against a back end that goes on to the token limit behind a stop that only the text shows."""
    decoder = ScriptedDecoder(round_size=6)
    body = (await complete(decoder, stop="b", max_tokens=400)).json()
    assert decoder.streams[0].said == list(b"ab")
    assert body["usage"]["completion_tokens"] == 2


async def test_an_answer_may_not_outgrow_the_context() -> None:
    """Guards the last places of the context: the answer ends with "length", a prompt without room gets 400."""
    for room in (1, 2, 5):
        prompt = [97] * (MAX_MODEL_LEN - room)
        choice = (await complete(ScriptedDecoder(), prompt=prompt, max_tokens=50)).json()["choices"][0]
        assert (len(choice["text"]), choice["finish_reason"]) == (room, "length")
    response = await complete(ScriptedDecoder(), prompt=[97] * MAX_MODEL_LEN)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert str(MAX_MODEL_LEN) in response.json()["error"]["message"]


# ---- parameters ----


async def test_unset_values_are_openai_s_or_the_model_s_own() -> None:
    """Guards the table of defaults: greedy is not one of them unless the model says so."""
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": [7, 257]}
    for files, name, expected in (
        ({}, "auto", (1.0, 1.0, 0, 0.0, 1.0, (257,))),
        (config, "auto", (0.6, 0.9, 20, 0.0, 1.1, (7, 257))),
        (config, "none", (1.0, 1.0, 0, 0.0, 1.0, (7, 257))),
    ):
        decoder = ScriptedDecoder()
        decoder.files = {"stub:bytes": b"", "generation_config.json": json.dumps(files).encode()}
        await complete(decoder, FrontConfig(generation_config=name))
        params = decoder.streams[0].request.params
        found = (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty)
        assert (*found, params.stop_token_ids) == expected
        assert params.max_tokens == COMPLETION_MAX_TOKENS


async def test_the_documentation_lists_every_default() -> None:
    """Guards the one table of defaults: each row is what an empty request gets, and what the model may replace."""
    text = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text("utf-8")
    table = text.split("## Defaults")[1].split("|---|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    documented = {name.strip("`"): (default, source) for name, default, source in rows}
    decoder, chatting = ScriptedDecoder(), ScriptedDecoder([*b"ab", EOS])
    await complete(decoder)
    await complete(chatting, **CHAT)
    params, chat_params = decoder.streams[0].request.params, chatting.streams[0].request.params
    of_model = {
        field.name
        for field in fields_of(Defaults)
        if getattr(Defaults.of_model({field.name: 7}), field.name) != getattr(Defaults(), field.name)
    }
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        assert documented.pop(name) == (str(getattr(params, name)), f"`{name}`")
        of_model.remove(name)
    for name in ("presence_penalty", "frequency_penalty", "min_tokens"):
        assert documented.pop(name) == (str(getattr(params, name)), "-")
    assert documented.pop("max_tokens`, completions") == (str(params.max_tokens), "-")
    assert documented.pop("max_tokens`, chat") == ("what the context has room for", "`max_new_tokens`")
    assert chat_params.max_tokens == MAX_MODEL_LEN - len(chatting.streams[0].request.prompt_ids)
    of_model.remove("max_new_tokens")
    assert documented.pop("n") == (str(len(decoder.streams)), "-")
    assert documented.pop("seed") == ("random", "-") and decoder.streams[0].request.seed is None
    assert not documented and not of_model


async def test_a_chat_answer_may_fill_the_context_unless_the_model_says_otherwise() -> None:
    """Guards chats against being cut after OpenAI's 16 tokens of completions."""
    for config, expected in (({}, MAX_MODEL_LEN - 21), ({"max_new_tokens": 7}, 7)):
        decoder = ScriptedDecoder([*b"ab", EOS])
        decoder.files = {"stub:bytes": b"", "generation_config.json": json.dumps(config).encode()}
        await complete(decoder, **CHAT)
        assert decoder.streams[0].request.params.max_tokens == expected


async def test_what_is_asked_for_reaches_the_decoder() -> None:
    """Guards against parameters that are validated and then dropped."""
    decoder = ScriptedDecoder()
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"97": 5, "98": -100},
        "allowed_token_ids": [97, 98, 99],
        "min_tokens": 2,
        "max_tokens": 5,
        "stop_token_ids": [99],
        "seed": 0,
    }
    await complete(decoder, **fields)
    request = decoder.streams[0].request
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.5, 3, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -1.0, 1.5)
    assert params.logit_bias == ((97, 5.0), (98, -100.0))
    assert params.allowed_token_ids == (97, 98, 99)
    assert (params.min_tokens, params.max_tokens, params.stop_token_ids) == (2, 5, (99, EOS))
    assert request.seed == 0


@pytest.mark.parametrize(("seed", "expected"), [(None, None), (0, 0), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1)])
async def test_seeds_of_both_conventions_are_taken(seed: int | None, expected: int | None) -> None:
    """Guards zero against being unset, and signed seeds against a 400."""
    decoder = ScriptedDecoder()
    await complete(decoder, seed=seed)
    assert decoder.streams[0].request.seed == expected


@pytest.mark.parametrize(
    ("server", "fields", "rule"),
    [
        ("auto", {}, Rule.STANDARD),
        ("auto", {"seed": 1}, Rule.COUPLED),
        ("standard", {"seed": 1}, Rule.STANDARD),
        ("coupled", {}, Rule.COUPLED),
        ("coupled", {"speculative": {"method": "standard"}}, Rule.STANDARD),
        ("standard", {"speculative": {"method": "coupled"}}, Rule.COUPLED),
        ("standard", {"seed": 1, "speculative": {"method": "auto"}}, Rule.COUPLED),
    ],
)
async def test_the_rule_follows_the_seed_unless_someone_decides(server: str, fields: Any, rule: Rule) -> None:
    """Guards the promise that a seed gives the same text whatever the draft does; the answer says which rule ran."""
    decoder = ScriptedDecoder()
    config = FrontConfig(policy=Policy(rejection_sample_method=server))
    body = (await complete(decoder, config, **fields)).json()
    assert decoder.streams[0].request.rule is rule
    assert body["metrics"]["speculative_decoding"]["rule"] == rule.name.lower()


@pytest.mark.parametrize(
    ("speculative", "expected"),
    [
        ({}, None),
        ({"enabled": False}, 0),
        ({"enabled": True}, None),
        ({"num_speculative_tokens": 0}, 0),
        ({"num_speculative_tokens": 3}, 3),
        ({"enabled": False, "num_speculative_tokens": 3}, 0),
    ],
)
async def test_speculation_can_be_switched_per_request(speculative: Any, expected: int | None) -> None:
    """Guards zero against being unset here too."""
    decoder = ScriptedDecoder()
    body = (await complete(decoder, speculative=speculative)).json()
    assert decoder.streams[0].request.num_speculative_tokens == expected
    if expected == 0:
        assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


async def test_the_client_s_timeout_shortens_the_server_s() -> None:
    """Guards `X-Request-Timeout`."""
    decoder = ScriptedDecoder()
    config = FrontConfig(policy=Policy(request_timeout_s=9.0))
    async with http_client(decoder, config) as client:
        for header, expected in (({}, 9.0), ({"X-Request-Timeout": "2.5"}, 2.5), ({"X-Request-Timeout": "99"}, 9.0)):
            await client.post("/v1/completions", json=GOOD, headers=header)
            assert expected - 1.0 < decoder.streams[-1].request.deadline_s <= expected


@pytest.mark.parametrize("prompt", ["hi", [104, 105], ["hi"], [[104, 105]]])
async def test_a_prompt_may_be_text_or_ids_or_a_list_of_one(prompt: Any) -> None:
    """Guards the four forms that OpenAI's clients send."""
    decoder = ScriptedDecoder()
    assert (await complete(decoder, prompt=prompt)).status_code == 200
    assert decoder.streams[0].request.prompt_ids[-2:] == (104, 105)


async def test_text_parts_of_a_message_are_joined() -> None:
    """Guards clients that send content as a list of parts."""
    decoder = ScriptedDecoder()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await complete(decoder, messages=[{"role": "user", "content": parts, "name": "me"}], max_tokens=1)
    assert b"user: a\nb\n" in bytes(token for token in decoder.streams[0].request.prompt_ids if token < 256)


# ---- bad input ----

BAD = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [""]}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": ["a", ""]}),
    ("prompt", {"prompt": [[97], []]}),
    ("prompt", {"prompt": ["a", [98]]}),
    ("prompt", {"prompt": ["a"] * 20, "n": 16}),
    ("prompt", {"prompt": [258]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [2**40]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": [1.5]}),
    ("prompt", {"prompt": 7}),
    ("prompt", {"prompt": {"text": "a"}}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": "\ud800"}),
    ("prompt", {"prompt": "x" * MAX_MODEL_LEN}),
    ("model", {"model": 7}),
    *[("max_tokens", {"max_tokens": value}) for value in (0, -1, "8", 1.5, True, [1], {})],
    *[("temperature", {"temperature": value}) for value in (-1, 101, "1", True, 10**400, [0.5])],
    *[("top_p", {"top_p": value}) for value in (0, -0.1, 1.1, "0.5")],
    *[("top_k", {"top_k": value}) for value in (-2, 2**31, 1.0, "3", True)],
    *[("min_p", {"min_p": value}) for value in (-0.1, 1.1)],
    *[("presence_penalty", {"presence_penalty": value}) for value in (-2.1, 2.1, "1")],
    *[("frequency_penalty", {"frequency_penalty": value}) for value in (-2.1, 2.1)],
    *[("repetition_penalty", {"repetition_penalty": value}) for value in (0, -1)],
    *[
        ("logit_bias", {"logit_bias": value})
        for value in ({"a": 1}, {"01": 1}, {"1": 101}, {"258": 1}, {"-1": 1}, {"1": "1"}, [])
    ],
    *[("allowed_token_ids", {"allowed_token_ids": value}) for value in ([258], [-1], ["a"], 5)],
    *[("min_tokens", {"min_tokens": value}) for value in (-1, 17, "1")],
    *[("stop", {"stop": value}) for value in ("", [""], [1], 5, {}, ["a"] * 65)],
    *[("stop_token_ids", {"stop_token_ids": value}) for value in ([258], [-1], ["1"], 3)],
    *[("seed", {"seed": value}) for value in ("1", 1.0, 2**64, -(2**63) - 1, True)],
    *[("n", {"n": value}) for value in (0, -1, 17, "2", True)],
    *[("stream", {"stream": value}) for value in ("true", 1)],
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": True, "stream_options": {"include_usage": 1}}),
    ("ignore_eos", {"ignore_eos": "yes"}),
    ("speculative", {"speculative": 3}),
    ("speculative.enabled", {"speculative": {"enabled": 1}}),
    ("speculative.num_speculative_tokens", {"speculative": {"num_speculative_tokens": -1}}),
    ("num_speculative_tokens", {"speculative": {"num_speculative_tokens": 99}}),
    ("speculative.method", {"speculative": {"method": "magic"}}),
    *[("logprobs", {"logprobs": value}) for value in (-1, 21, "5", True, 1.0)],
    *[("logprobs", {**CHAT, "logprobs": value}) for value in (1, 5, "true")],
    *[("top_logprobs", {**CHAT, "logprobs": True, "top_logprobs": value}) for value in (-1, 21, True, "2")],
    ("top_logprobs", {**CHAT, "top_logprobs": 2}),
    *[("prompt_logprobs", {"prompt_logprobs": value}) for value in (-1, 21, True)],
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    ("echo", {"echo": 1}),
    ("echo", {**CHAT, "echo": True}),
    ("best_of", {"best_of": 2}),
    ("best_of", {"best_of": 0}),
    ("suffix", {"suffix": "x"}),
    *[("bad_words", {"bad_words": value}) for value in ("a", [""], [1], ["a"] * 257, ["\ud800"])],
    *[("truncate_prompt_tokens", {"truncate_prompt_tokens": value}) for value in (-2, 1.5, "1")],
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    ("add_special_tokens", {"add_special_tokens": 1}),
    ("guided_grammar", {"guided_grammar": 'start: "a"'}),
    ("response_format", {"response_format": {"type": "xml"}}),
    ("response_format", {"response_format": {"type": "json_schema"}}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("guided_choice", {"guided_choice": []}),
    ("guided_regex", {"guided_json": {}, "guided_regex": "a"}),
    *[("messages", {"messages": value}) for value in ([], "hi", [{}], [{"role": 1}], [{"content": "a"}], [1])],
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    ("messages", {"messages": [{"role": "user", "content": "\udfff"}]}),
    ("max_completion_tokens", {**CHAT, "max_completion_tokens": 0}),
    ("continue_final_message", {**CHAT, "continue_final_message": True, "add_generation_prompt": True}),
    ("tools", {**CHAT, "tools": {"type": "function"}}),
    ("tools", {**CHAT, "tools": [{"type": "function"}], "tool_choice": "required"}),
    ("tool_choice", {**CHAT, "tool_choice": "required"}),
    ("tool_choice", {**CHAT, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("messages", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}),
    ("messages", {"messages": [{"role": "assistant", "tool_calls": 5}]}),
    ("documents", {**CHAT, "documents": "x"}),
    ("reasoning_effort", {**CHAT, "reasoning_effort": "low"}),
    ("chat_template", {**CHAT, "chat_template": "{{ messages }}"}),
]


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: str(value)[:40])
async def test_bad_input_gets_400_naming_the_field(field: str, fields: dict[str, Any]) -> None:
    """Guards against crashes, silent clamps and messages that leave the client guessing; the next request works."""
    decoder = ScriptedDecoder()
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    body = json.dumps({**({} if "messages" in fields else GOOD), **fields})
    async with http_client(decoder) as client:
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", field)
        assert field in error["message"]
        assert not decoder.streams
        assert (await client.post("/v1/completions", json=GOOD)).status_code == 200


async def test_no_body_whatever_breaks_the_server() -> None:
    """Guards against 500 for combinations that nobody thought of: known fields with values of any kind."""
    chance = random.Random(0)
    odd: list[Any] = [
        None,
        True,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        0.5,
        -1.5,
        1e308,
        "",
        "a",
        "8",
        "\ud83d",
        "\x00",
        "é😀",
    ]
    odd += [[], {}, [1], ["a"], [[]], [None], {"a": 1}, {"1": 1}, {"type": "text"}, [{"role": "user", "content": "a"}]]
    names = [*FIELDS, "unknown"]
    statuses = Counter[int]()
    async with http_client(ScriptedDecoder([*b"abc", EOS])) as client:
        for _ in range(600):
            path, base = chance.choice([("/v1/completions", GOOD), ("/v1/chat/completions", CHAT)])
            body = base | {chance.choice(names): chance.choice(odd) for _ in range(chance.randint(1, 3))}
            response = await client.post(path, content=json.dumps(body))
            statuses[response.status_code] += 1
            assert response.status_code in (200, 400, 404), (body, response.text)
    assert min(statuses[200], statuses[400]) > 50


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
    ids=lambda body: body[:24].decode("latin-1"),
)
async def test_a_body_that_is_no_json_object_gets_400(body: bytes) -> None:
    """Guards against 500 for whatever a client may send."""
    async with http_client(ScriptedDecoder()) as client:
        response = await client.post("/v1/completions", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "body"


async def test_a_body_beyond_the_limit_is_refused() -> None:
    """Guards the coordinator's memory."""
    async with http_client(ScriptedDecoder()) as client:
        response = await client.post("/v1/completions", json={**GOOD, "prompt": "x" * (1 << 20)})
        assert response.status_code == 413
        assert response.json()["error"]["message"].startswith("body: is larger than 1048576 bytes")

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b" " * 65_536

        response = await client.post("/v1/completions", content=endless())  # without a Content-Length
        assert response.status_code == 413
        assert "1048576 bytes" in response.json()["error"]["message"]


async def test_unknown_fields_are_named_in_a_header_or_refused() -> None:
    """Guards against typing errors that nobody notices, and against header injection by their names."""
    response = await complete(ScriptedDecoder(), **{"temprature": 1, "a,\r\nb": 2, "ü": 3})
    assert response.status_code == 200
    assert response.headers["x-outrider-ignored-fields"] == "temprature, a\\x2c\\r\\nb, \\xfc"
    strict = await complete(ScriptedDecoder(), FrontConfig(strict_fields=True), temprature=1)
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "temprature")


async def test_another_model_is_404() -> None:
    """Guards against answers by a model that was not asked for."""
    response = await complete(ScriptedDecoder(), model="gpt-5")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert (await complete(ScriptedDecoder(), FrontConfig(served_model_name="gpt-5"), model="gpt-5")).status_code == 200


async def test_errors_of_the_framework_have_the_same_shape() -> None:
    """Guards clients that read `error.message` of every failure."""
    async with http_client(ScriptedDecoder()) as client:
        for response in (await client.get("/nothing"), await client.get("/v1/completions")):
            assert response.status_code in (404, 405)
            assert response.json()["error"]["type"] == "invalid_request_error"


# ---- failures and load ----


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_fails_ends_in_an_error(stream: bool, after: int) -> None:
    """Guards against `stop` for an answer that was cut by a deadline; the status is 200 only if text was sent."""
    decoder = ScriptedDecoder(round_size=3)
    decoder.error, decoder.error_after = DeadlineExceeded("not finished within 1 s"), after
    response = await complete(decoder, stream=stream)
    if stream and after:
        assert response.status_code == 200
        first, last = events(response)
        assert first["choices"][0]["finish_reason"] is None
    else:
        assert response.status_code == 504
        last = response.json()
    assert last["error"]["type"] == "timeout_error"
    assert decoder.streams[0].closed


async def test_a_bug_is_500_and_the_next_request_works() -> None:
    """Guards against traces in responses, and against one request's failure reaching others."""
    decoder = ScriptedDecoder()
    async with http_client(decoder) as client:
        decoder.error = ZeroDivisionError("secret")
        response = await client.post("/v1/completions", json=GOOD)
        assert (response.status_code, "secret" in response.text) == (500, False)
        decoder.error = NonFiniteLogits("row 3")
        assert (await client.post("/v1/completions", json=GOOD)).status_code == 500
        decoder.error = None
        assert (await client.post("/v1/completions", json=GOOD)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_answer(stream: bool) -> None:
    """Guards both services' memory, also where nothing has been sent yet."""
    decoder = ScriptedDecoder()
    decoder.gate = asyncio.Event()
    async with http_client(decoder) as client:
        call = asyncio.ensure_future(client.post("/v1/completions", json={**GOOD, "stream": stream}))
        while not decoder.streams:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert decoder.streams[0].closed


async def test_a_disconnect_message_ends_the_answer() -> None:
    """Guards servers that say so instead of cancelling the call."""
    decoder = ScriptedDecoder()
    decoder.gate = asyncio.Event()
    async with running_front(decoder) as front:
        app = build_app(lambda: front)
        messages = iter([{"type": "http.request", "body": json.dumps(GOOD).encode()}])
        sent = []

        async def receive() -> dict[str, Any]:
            for message in messages:
                return message
            while not decoder.streams:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await asyncio.wait_for(app(scope, receive, send), 10)
        assert decoder.streams[0].closed
        assert not sent


async def test_overload_is_refused_at_once_and_the_rest_is_served_in_order() -> None:
    """Guards against queues without an end; the refusal says when to come back."""
    decoder = ScriptedDecoder()
    decoder.gate = asyncio.Event()
    async with http_client(decoder, FrontConfig(max_num_seqs=2, queue_factor=1)) as client:
        calls = []
        for number in range(4):
            body = {**GOOD, "prompt": [number + 1]}
            calls.append(asyncio.ensure_future(client.post("/v1/completions", json=body)))
            while len(calls) > len(decoder.streams) + await waiting(client):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        refused = await client.post("/v1/completions", json=GOOD)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        decoder.gate.set()
        assert [response.status_code for response in await asyncio.gather(*calls)] == [200] * 4
        assert [stream.request.prompt_ids for stream in decoder.streams] == [(1,), (2,), (3,), (4,)]


async def waiting(client: httpx.AsyncClient) -> int:
    """Requests in the queue."""
    text = (await client.get("/metrics")).text
    return next(int(float(line.split()[1])) for line in text.splitlines() if line.startswith("outrider:num_requests_w"))


async def test_a_request_may_not_wait_longer_than_its_deadline() -> None:
    """Guards against time in the queue that no deadline counts."""
    decoder = ScriptedDecoder()
    decoder.gate = asyncio.Event()
    async with http_client(decoder, FrontConfig(max_num_seqs=1)) as client:
        first = asyncio.ensure_future(client.post("/v1/completions", json=GOOD))
        while not decoder.streams:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        late = await client.post("/v1/completions", json=GOOD, headers={"X-Request-Timeout": "0.01"})
        assert late.status_code == 504
        decoder.gate.set()
        assert (await first).status_code == 200
        assert (await client.post("/v1/completions", json=GOOD)).status_code == 200


@pytest.mark.parametrize(
    ("files", "template", "reason"),
    [
        ({}, "{% if", "chat_template: cannot be compiled"),
        ({"generation_config.json": b'{"top_k": NaN}'}, None, "cannot convert float NaN"),
    ],
)
async def test_a_target_that_cannot_be_served_says_why(
    files: dict[str, bytes], template: str | None, reason: str
) -> None:
    """A start that never comes to an end, with not a word anywhere (field fault 102)."""
    decoder = ScriptedDecoder()
    decoder.files |= files
    front = Front(decoder, FrontConfig(chat_template=template))
    await front.start()
    async with asyncio.timeout(10):
        while "cannot be served" not in front.readiness.reason:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert reason in front.readiness.reason
    await front.close()


async def test_time_in_the_queue_is_taken_off_the_deadline() -> None:
    """A request that may take ten seconds must not wait for nine and then decode for ten."""
    decoder = ScriptedDecoder()
    decoder.gate = asyncio.Event()
    async with running_front(decoder, FrontConfig(max_num_seqs=1)) as front:
        transport = httpx.ASGITransport(build_app(lambda: front))
        async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:
            first = asyncio.ensure_future(client.post("/v1/completions", json=GOOD))
            while not decoder.streams:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            second = asyncio.ensure_future(
                client.post("/v1/completions", json=GOOD, headers={"X-Request-Timeout": "100"})
            )
            while not front._admission.waiting:  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            decoder.gate.set()
            assert (await first).status_code == (await second).status_code == 200
        assert decoder.streams[1].request.deadline_s <= 100 - 0.05


async def test_draining_refuses_new_requests_and_waits_for_the_others() -> None:
    """Guards running answers against SIGTERM."""
    decoder = ScriptedDecoder()
    decoder.gate = asyncio.Event()
    async with running_front(decoder) as front:
        transport = httpx.ASGITransport(build_app(lambda: front))
        async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:
            running = asyncio.ensure_future(client.post("/v1/completions", json=GOOD))
            while not decoder.streams:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            draining = asyncio.ensure_future(front.drain(30))
            await asyncio.sleep(0)
            assert (await client.post("/v1/completions", json=GOOD)).status_code == 503
            assert (await client.get("/ready")).status_code == 503
            assert not draining.done()
            decoder.gate.set()
            await draining
            assert (await running).status_code == 200


# ---- the other routes ----


async def test_readiness_is_the_target_s_and_a_missing_draft_only_degrades() -> None:
    """Guards against a dead draft taken for an outage, and against requests sent to a coordinator without target."""
    decoder = ScriptedDecoder()
    target = part_info(model_revision="r1", weight_hash="w1", parameters=5, device_name="card", device_uuid="GPU-1")
    decoder.target = None
    async with http_client(decoder) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/v1/completions", json=GOOD)).status_code == 503
        decoder.target = target
        while (ready := await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        body = ready.json()
        assert (body["degraded"], body["draft"], body["last_step_age_s"]) == ([], None, None)
        assert (body["target"]["dtype"], body["max_num_seqs"]) == (target.dtype, target.max_num_seqs)
        named = ("revision", "weight_hash", "parameters", "vocab_rows", "device", "device_uuid")
        assert tuple(body["target"][name] for name in named) == ("r1", "w1", 5, target.vocab_rows, "card", "GPU-1")
        decoder.target = None
        assert (await client.get("/ready")).status_code == 503


async def test_a_request_outlasts_a_moment_without_a_target_and_no_more() -> None:
    """Guards new requests against a link that is made anew, and clients against a queue before a dead target."""
    decoder = ScriptedDecoder()
    async with http_client(decoder) as client:
        decoder.target, decoder.degraded = None, [Degraded("target", "the link was cut", 0.5)]
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["degraded"][0]["part"]) == (200, "target")
        assert (await client.post("/v1/completions", json=GOOD)).status_code == 200
        decoder.degraded = [Degraded("target", "it was killed", 60.0)]
        assert (await client.get("/ready")).status_code == 503
        refused = await client.post("/v1/completions", json=GOOD)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


async def test_planted_errors_need_the_leave_of_every_part() -> None:
    """Guards against a request that spoils its own answer, or the draft's good name, on a server in production."""
    decoder = ScriptedDecoder()
    for coordinator, target in ((False, True), (True, False), (True, True)):
        decoder.target = part_info(allow_planted_errors=target)
        async with http_client(decoder, FrontConfig(allow_planted_errors=coordinator)) as client:
            answer = await client.post("/v1/completions", json={**GOOD, "speculative": {"planted_error": "raw-q"}})
            allowed = (await client.get("/ready")).json()["planted_errors"]
            metrics = (await client.get("/metrics")).text
            assert (await client.post("/v1/completions", json=GOOD)).status_code == 200
        assert allowed == [part for part, allows in (("coordinator", coordinator), ("target", target)) if allows]
        assert f'outrider:planted_errors{{part="target"}} {float(target)}' in metrics
        if coordinator and target:
            assert answer.status_code == 200
            assert decoder.streams[-2].request.planted is Plant.RAW_Q
        else:
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "speculative.planted_error"


async def test_the_model_and_the_version_are_listed() -> None:
    """Guards clients that ask first."""
    async with http_client(ScriptedDecoder()) as client:
        (entry,) = (await client.get("/v1/models")).json()["data"]
        assert (entry["id"], entry["object"], entry["max_model_len"]) == (MODEL, "model", MAX_MODEL_LEN)
        assert "version" in (await client.get("/version")).json()
        document = (await client.get("/openapi.json")).json()
        assert "ChatCompletionRequest" in document["components"]["schemas"]
