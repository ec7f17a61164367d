"""`tool_choice` and `parallel_tool_calls`: answers that are calls, exactly, drafted or not, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.front import FrontConfig
from coordinator.text import AnswerText
from outrider.engine.grammar import Grammars, Matcher
from outrider.grammar import Grammar, GrammarKind
from tests.scripted_decoder import EOS, ScriptedDecoder
from tests.unit.test_grammar import pair_of, table
from tests.unit.test_parameters import COUPLED, GREEDY, OFF, ask, client_of, streamed
from tests.unit.test_tool_calls import CALL, chat, read

__all__ = ["table"]  # a fixture

SIZE = {"$defs": {"size": {"enum": [1, 23]}}, "type": "object", "properties": {"n": {"$ref": "#/$defs/size"}}}
ADD = {**SIZE, "required": ["n"], "additionalProperties": False}
SAY = {"properties": {"text": {"type": "string", "maxLength": 3}}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in {"add": ADD, "say": SAY, "stop": None}.items()
]
NAMED = {"type": "function", "function": {"name": "add"}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": [*TOOLS[:2]], "max_tokens": 600}


def functions(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments of the calls, which are all that is said."""
    message = choice["message"]
    assert not message["content"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["index"] for call in message["tool_calls"]] == list(range(len(message["tool_calls"])))
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


def check(calls: list[tuple[str, Any]]) -> None:
    for name, arguments in calls:
        if name == "add":
            assert arguments["n"] in (1, 23) and len(arguments) == 1
        else:
            assert name == "say"
            assert arguments.keys() <= {"text"} and len(arguments.get("text", "")) <= 3


def without_names(choice: dict[str, Any]) -> dict[str, Any]:
    """All that must not depend on speculation; each call has a new id."""
    calls = [{**call, "id": ""} for call in choice["message"]["tool_calls"]]
    return {**choice, "drafted": None, "message": {**choice["message"], "tool_calls": calls}}


@pytest.mark.parametrize("mode", [GREEDY, COUPLED, {"temperature": 1}], ids=["greedy", "coupled", "standard"])
@pytest.mark.parametrize("draft", ["perfect", "accept?p=0.7"])
async def test_a_call_that_is_required_is_made(table: Path, draft: str, mode: dict[str, Any]) -> None:
    """Guards the form, names and arguments at every slot, streams, and one call where one is asked for."""
    pair = pair_of(table, draft)
    async with client_of(pair) as client:
        for asked in ({"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": NAMED}):
            fields = {**CHAT, **mode, **asked}
            (whole,) = (await ask(client, "chat/completions", **fields))["choices"]
            calls = functions(whole)
            assert len(calls) == 1 and (asked["tool_choice"] == "required" or calls[0][0] == "add")
            check(calls)
            if mode is not COUPLED:
                continue
            (plain,) = (await ask(client, "chat/completions", **fields, **OFF))["choices"]
            assert without_names(plain) == without_names(whole)
            chunks = await streamed(client, "chat/completions", **fields)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert not any(delta.get("content") for delta in deltas)
            (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == calls[0]
            assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert max(pair.rounds) == 4 if draft == "perfect" else min(pair.rounds) < 4


def test_calls_may_follow_one_another_where_that_is_asked_for() -> None:
    """Guards `required` with parallel calls, and one call where one is wanted."""
    call = b'<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for several, behind in ((True, [10, EOS]), (False, [EOS])):
        text = json.dumps({"functions": {"f": {"type": "object"}}, "several": several})
        matcher = Grammars(None, 258, (EOS,)).matcher(Grammar(GrammarKind.TOOL_CALLS, text))
        mask = matcher.mask([*call], 258)
        assert mask is not None and np.flatnonzero(mask).tolist() == behind
        mask = matcher.mask([*call, 10], 258)
        assert (mask is None) is not several


async def test_required_calls_are_parallel_unless_one_is_wanted() -> None:
    """Guards what the services are told."""
    for fields, several in (({}, True), ({"parallel_tool_calls": False}, False)):
        decoder = ScriptedDecoder([*CALL.encode(), EOS])
        await chat(decoder, tools=TOOLS, tool_choice="required", max_tokens=200, **fields)
        grammar = decoder.streams[-1].request.params.grammar
        assert grammar is not None and grammar.kind is GrammarKind.TOOL_CALLS
        told = json.loads(grammar.text)
        assert told == {"functions": {"add": ADD, "say": SAY, "stop": None}, "several": several}


async def test_a_form_that_is_not_kept_is_seen(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted error: no mask."""
    monkeypatch.setattr(Matcher, "mask", lambda self, generated, vocab: None)
    async with client_of(pair_of(table, "accept?p=0.7")) as client:
        fields = {**CHAT, **COUPLED, "max_tokens": 60, "tool_choice": "required"}
        (choice,) = (await ask(client, "chat/completions", **fields))["choices"]
    assert choice["finish_reason"] != "tool_calls"


async def test_what_cannot_be_called_is_refused_by_name() -> None:
    """Guards against a call that is asked for and left to chance."""
    foreign = FrontConfig(chat_template="{{ tools }}[TOOL_CALLS]{{ messages[0].content }}")
    strange = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    for field, fields, config in (
        ("tool_choice", {"tool_choice": "required"}, None),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, None),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, None),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "sometimes"}, None),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "required"}, foreign),
        ("tool_choice", {"tools": TOOLS, "tool_choice": NAMED, "guided_choice": ["a"]}, None),
        ("ignore_eos", {"tools": TOOLS, "tool_choice": NAMED, "ignore_eos": True}, None),
        ("tools", {"tools": [{"type": "custom"}], "tool_choice": "required"}, None),
        ("tools", {"tools": [strange], "tool_choice": "required"}, None),
        ("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": "no"}, None),
    ):
        response = await chat(ScriptedDecoder([EOS]), config, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_ends_behind_its_first_call(stream: bool) -> None:
    """Guards `parallel_tool_calls: false` where the model may call as it likes: nothing behind the call is made."""
    decoder = ScriptedDecoder([*f"Hm. {CALL}\n{CALL}".encode(), EOS], 5)
    tools = [{"type": "function", "function": {"name": "add"}}]
    fields = {"tools": tools, "parallel_tool_calls": False, "max_tokens": 400, "stream": stream}
    response = await chat(decoder, **fields)
    if stream:
        choices = [json.loads(line[6:])["choices"][0] for line in response.text.split("\n\n")[:-2]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    else:
        choices = response.json()["choices"]
        calls = choices[0]["message"]["tool_calls"]
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in calls] == ["add"]
    assert len(decoder.streams[-1].said) == len(f"Hm. {CALL}".encode())


async def test_a_tag_in_an_argument_does_not_end_the_answer() -> None:
    """Guards `parallel_tool_calls: false` against a cut in the middle of a call that speaks of calls."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "</tool_call> \\" </tool_call>"}}\n</tool_call>'
    decoder = ScriptedDecoder([*f"{call} {call}".encode(), EOS], 5)
    tools = [{"type": "function", "function": {"name": "add"}}]
    response = await chat(decoder, tools=tools, parallel_tool_calls=False, max_tokens=400)
    (choice,) = response.json()["choices"]
    assert [json.loads(one["function"]["arguments"]) for one in choice["message"]["tool_calls"]] == [
        {"a": '</tool_call> " </tool_call>'}
    ]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert len(decoder.streams[-1].said) == len(call.encode())


def test_a_tag_inside_a_string_is_text() -> None:
    """Guards calls whose arguments speak of tool calls, and what is no call with a string that never ends."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call> \\" </tool_call>"}}\n</tool_call>'
    assert read(f"x{call}y", [1] * 200) == (
        "xy",
        [{"name": "f", "arguments": '{"a": "</tool_call> \\" </tool_call>"}'}],
    )
    broken = '<tool_call>{"name</tool_call> b'
    assert read(broken, [1] * 100) == (broken, [])


def test_last_words_are_shown_and_stop_strings_are_not() -> None:
    """Guards a stop string of the client's own that is a last word too."""

    class Letters:
        def push(self, token: int) -> str:
            return chr(token)

        def flush(self) -> str:
            return ""

    for stop, said in (((), "ab!"), (("b",), "a"), (("!",), "ab")):
        text = AnswerText(Letters(), stop=stop, last_words=["!"])  # type: ignore[arg-type]
        tokens = [*b"ab!c"]
        at = text.cut(tokens)
        assert at is not None
        assert text.take(tokens[: at + 1], last=True).text == said
