"""Every honoured field of the one table has a request in which it is set, answered with and without speculation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.fields import FIELDS, Door, Field, Treatment
from coordinator.front import FrontConfig
from coordinator.prepare import Policy
from tests.scripted_decoder import MODEL
from tests.unit.pure_pair import PurePair
from tests.unit.test_grammar import ASKED
from tests.unit.test_parameters import MODES, OFF, PARAMETERS, PROMPT, ask, client_of, streamed, what_is_said
from tests.unit.test_tool_choice import CHAT as TOOL_CHAT
from tests.unit.test_tool_choice import NAMED

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
TRUSTING = FrontConfig(max_speculative_tokens=8, policy=Policy(trust_request_chat_template=True))
TEMPLATE = "{{ bos_token }}{{ reasoning_effort }}{{ x }}{{ messages[-1].content }}"

COMPLETIONS: dict[str, dict[str, Any]] = {
    "ignore_eos": {"ignore_eos": True},
    "skip_special_tokens": {"skip_special_tokens": False, "add_special_tokens": True, "echo": True},
    "best_of": {"n": 2, "best_of": 2},
    "speculative": {"model": MODEL, "speculative": {"num_speculative_tokens": 2}},
}
CHATS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "max_completion_tokens": {"max_completion_tokens": 9},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "add_generation_prompt": {"add_generation_prompt": False},
    "continue_final_message": {
        "continue_final_message": True,
        "messages": [*MESSAGES, {"role": "assistant", "content": "The sum"}],
    },
    "tools": {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
    "documents": {"documents": [{"text": "x"}]},
    "chat_template": {"chat_template": TEMPLATE, "chat_template_kwargs": {"x": "ab"}, "reasoning_effort": "low"},
    "penalties": {"frequency_penalty": 0.5, "bad_words": ["bcd"], "stop": ["tuv"], "logprobs": True},
}
ROWS = [(Door.COMPLETIONS, name) for name in COMPLETIONS] + [(Door.CHAT, name) for name in CHATS]


def fields_of(door: Door, name: str, mode: str) -> dict[str, Any]:
    body = COMPLETIONS[name] if door is Door.COMPLETIONS else CHATS[name]
    subject = {"prompt": PROMPT} if door is Door.COMPLETIONS else {"messages": MESSAGES}
    return {**subject, "max_tokens": 10, **MODES[mode], **body}


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
@pytest.mark.parametrize(("door", "name"), ROWS, ids=[f"{door.value}-{name}" for door, name in ROWS])
async def test_a_field_gives_the_same_answer_with_speculation_on_and_off(door: Door, name: str, mode: str) -> None:
    """Guards what `test_parameters` leaves out: text, ids, log-probabilities, usage and reasons."""
    pair, fields = PurePair(), fields_of(door, name, mode)
    path = "completions" if door is Door.COMPLETIONS else "chat/completions"
    async with client_of(pair, TRUSTING) as client:
        # Each with a salt of its own, so that none finds the prompt computed already and says so.
        plain = what_is_said(await ask(client, path, **{**fields, **OFF, "cache_salt": "1"}))
        assert not pair.rounds
        assert what_is_said(await ask(client, path, **fields, cache_salt="2")) == plain
        assert pair.rounds
        chunks = await streamed(client, path, **fields, cache_salt="3", stream_options={"include_usage": True})
        assert chunks[-1]["usage"] == plain[1]
        ids = [[*choice["token_ids"]] for choice in plain[0]]
        for index, own in enumerate(ids):
            parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
            assert [token for part in parts for token in part["token_ids"]] == own


def untested(table: Mapping[str, Field]) -> dict[Door, set[str]]:
    """Honoured fields by endpoint that no request of any such test sets."""
    said = {
        Door.COMPLETIONS: [
            *({"prompt": PROMPT, **mode} for mode in MODES.values()),
            *PARAMETERS.values(),
            *COMPLETIONS.values(),
            *ASKED.values(),
        ],
        Door.CHAT: [*CHATS.values(), TOOL_CHAT, {"tool_choice": NAMED}],
    }
    always = {"max_tokens", "return_token_ids", "stream", "stream_options", "speculative"}  # every test sets these
    # What both endpoints take is one field of one model; either of them shows it.
    everywhere = always | {name for bodies in said.values() for body in bodies for name in body}
    return {
        door: {
            name
            for name, field in table.items()
            if field.treatment is Treatment.HONOURED and door in field.doors and name not in everywhere
        }
        for door in Door
    }


def test_every_honoured_field_is_tested() -> None:
    """Guards against a field that comes later without such a test."""
    assert untested(FIELDS) == {Door.COMPLETIONS: set(), Door.CHAT: set()}


def test_a_new_field_without_a_test_is_seen() -> None:
    """The planted error."""
    new = {**FIELDS, "new_one": Field(Treatment.HONOURED, (Door.CHAT,))}
    assert untested(new) == {Door.COMPLETIONS: set(), Door.CHAT: {"new_one"}}
