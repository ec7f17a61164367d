"""Tools: what the model is told of them, and calls read out of its text, whole and in pieces of any size."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.front import FrontConfig
from coordinator.prepare import Policy
from coordinator.tool_calls import ToolCallReader
from tests.scripted_decoder import EOS, MODEL, ScriptedDecoder, http_client

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "hi"}]


def read(text: str, cuts: list[int]) -> tuple[str, list[dict[str, str]]]:
    """Text and functions, fed in pieces of these sizes."""
    reader, content, functions, at = ToolCallReader(), "", [], 0
    for size in [*cuts, len(text)]:
        parsed = reader.feed(text[at : at + size], last=at + size >= len(text))
        content += parsed.content
        functions += [call["function"] for call in parsed.calls]
        at += size
        if at >= len(text):
            break
    return content, functions


async def chat(decoder: ScriptedDecoder, config: FrontConfig | None = None, **fields: Any) -> httpx.Response:
    async with http_client(decoder, config) as client:
        return await client.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, **fields})


def prompt_of(decoder: ScriptedDecoder) -> str:
    return bytes(token for token in decoder.streams[-1].request.prompt_ids if token < 256).decode()


@given(st.lists(st.integers(1, 9), max_size=60))
def test_calls_are_the_same_whatever_the_rounds(cuts: list[int]) -> None:
    """Guards against tags torn between rounds, leaked in part, or missed when several tokens come at once."""
    text = f"Well,\n {CALL}\n{CALL} a < b <tool"
    function = {"name": "add", "arguments": '{"a": 1, "b": "é"}'}
    assert read(text, cuts) == ("Well,a < b <tool", [function, function])


@given(
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", " ", "\n", "a", "{", '{"name": "f"}', '{"name": 1}', "<", "[]", "</tool"]
        ),
        max_size=12,
    ),
    st.lists(st.integers(1, 5), max_size=40),
)
def test_any_text_reads_alike_whole_and_in_pieces(parts: list[str], cuts: list[int]) -> None:
    """Guards streams against another answer than the whole one, for text that is nearly a call too."""
    text = "".join(parts)
    assert read(text, cuts) == read(text, [])


@pytest.mark.parametrize(
    "text",
    [
        "a <tool_call>{broken</tool_call> b",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        "<tool_call>{",
        "a <tool_",
        " <tool_call><function=f></function></tool_call>\n",
    ],
)
def test_what_is_no_call_stays_text_as_it_was_written(text: str) -> None:
    """Guards against text that gets lost because it looked like a call."""
    assert read(text, [1] * 100) == (text, [])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_given_out_with_its_own_reason(stream: bool) -> None:
    """Guards agents: `tool_calls` with arguments as text, `finish_reason`, and content beside it."""
    response = await chat(
        ScriptedDecoder([*f"Hm. {CALL}".encode(), EOS], 5), tools=[TOOL], max_tokens=200, stream=stream
    )
    if stream:
        lines = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
        deltas = [line["choices"][0]["delta"] for line in lines]
        content = "".join(delta.get("content", "") for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        reason = lines[-1]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        content, calls, reason = choice["message"]["content"], choice["message"]["tool_calls"], choice["finish_reason"]
    assert (content, reason) == ("Hm.", "tool_calls")
    assert [call["function"]["name"] for call in calls] == ["add"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1, "b": "é"}
    assert calls[0]["id"].startswith("call_") and calls[0]["type"] == "function"


async def test_without_tools_the_text_is_left_alone() -> None:
    """Guards answers that talk about tool calls."""
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        body = (await chat(ScriptedDecoder([*CALL.encode(), EOS]), max_tokens=200, **fields)).json()
        message = body["choices"][0]["message"]
        assert (message["content"], body["choices"][0]["finish_reason"]) == (CALL, "stop")
        assert "tool_calls" not in message


async def test_the_template_is_told_of_tools_documents_and_calls() -> None:
    """Guards against fields that are taken and never reach the model."""
    decoder = ScriptedDecoder([EOS])
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    await chat(decoder, messages=messages, tools=[TOOL], documents=[{"title": "t", "text": "x"}])
    prompt = prompt_of(decoder)
    assert f"tools: {json.dumps([TOOL])}\n" in prompt
    assert 'documents: [{"title": "t", "text": "x"}]\n' in prompt
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\ntool: 3\n' in prompt
    await chat(decoder, tools=[TOOL], tool_choice="none")
    assert "tools:" not in prompt_of(decoder)


async def test_a_template_that_reads_none_refuses_them_by_name() -> None:
    """Guards against documents and tools that the model never sees."""
    config = FrontConfig(chat_template="{% for message in messages %}{{ message.content }}{% endfor %}")
    for field, value in (("tools", [TOOL]), ("documents", [{"text": "x"}]), ("reasoning_effort", "low")):
        response = await chat(ScriptedDecoder([EOS]), config, **{field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    effort = FrontConfig(chat_template="{{ reasoning_effort }}!{{ messages[0].content }}")
    decoder = ScriptedDecoder([EOS])
    assert (await chat(decoder, effort, reasoning_effort="low")).status_code == 200
    assert prompt_of(decoder) == "low!hi"


async def test_a_request_s_own_template_is_taken_where_it_is_trusted() -> None:
    """Guards both sides of `--trust-request-chat-template`."""
    trusting = FrontConfig(policy=Policy(trust_request_chat_template=True))
    decoder = ScriptedDecoder([EOS])
    fields = {"chat_template": "{{ bos_token }}<{{ messages[0].content }}{{ x }}>", "chat_template_kwargs": {"x": 7}}
    assert (await chat(decoder, trusting, **fields)).status_code == 200
    assert prompt_of(decoder) == "<hi7>"
    assert decoder.streams[-1].request.prompt_ids[0] == 256
    refused = await chat(decoder, **fields)
    assert refused.json()["error"]["param"] == "chat_template"
