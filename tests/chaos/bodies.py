"""Random request bodies for the HTTP door: some that a careless client sends, some that only an enemy would."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from coordinator.fields import FIELDS, Door

NUMBERS = [-1, 0, 1, 2, 16, 255, 256, 257, 258, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)]
FLOATS = [0.0, -0.0, 1e-9, 0.5, 0.9, 1.0, 1.5, 2.0, 100.0, -100.0, 1e38, 1e308, float("nan"), float("inf")]
TEXTS = [
    "",
    " ",
    "a",
    "1",
    "1e3",
    "-0",
    "true",
    "null",
    "\x00",
    "\ud83d",
    "e\u0301",
    "\u202e",
    "\ufffd",
    "\U0001f600" * 9,
    "<|endoftext|>",
    "<tool_call>",
    "stub:markov",
    "x" * 2_000,
    "{{ 7 * 7 }}",
]
PLAUSIBLE: dict[str, list[Any]] = {
    "prompt": ["Hello", "", [72, 105], [[72], [73, 74]], ["a", "b"], [], [258], [2**32], "x" * 3_000],
    "messages": [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url"}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{"}}]}],
        [{"content": "hi"}],
        [],
    ],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}, {"x": 1}],
    "max_tokens": [1, 3, 40, 10**8],
    "temperature": [0, 0.7, 1, 1.5],
    "top_p": [0.1, 0.9, 1],
    "seed": [*NUMBERS],
    "n": [1, 2, 16, 17],
    "stop": ["a", ["b", "cd"], ["x"] * 65, [""], ["<eos>"]],
    "logit_bias": [{"65": 5}, {"65": -100}, {"258": 1}, {"-1": 1}, {"a": 1}, {"65": "1"}, {"99999999999": 1}],
    "allowed_token_ids": [[65], [257], [], [65] * 500, [2**40]],
    "bad_words": [["a"], ["b c"], [""], ["\ud800"]],
    "logprobs": [True, 0, 1, 20, 21],
    "top_logprobs": [0, 5, 21],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": {"enum": [1, 2]}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}}},
        {"type": "json_schema"},
    ],
    "guided_regex": ["[ab]{1,9}", "(", "(a+)+$", "a{1,100000}"],
    "guided_choice": [["a", "b"], [], ["x" * 2_000]],
    "guided_json": ["{}", "{", {"type": "array"}, True],
    "structured_outputs": [{"json_object": True}, {"regex": "a*"}, {}],
    "speculative": [{"enabled": False}, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 99}, {"method": "x"}],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], [], [{}]],
    "tool_choice": ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}, {}],
    "truncate_prompt_tokens": [-1, 1, 100],
}


class Body(NamedTuple):
    """A request: its endpoint, what is sent, and after how many bytes of the answer the client hangs up, if it does."""

    door: Door
    data: bytes
    hangs_up: int | None


def random_body(dice: random.Random) -> Body:
    """One request."""
    door = dice.choice([Door.COMPLETIONS, Door.CHAT])
    known = [name for name, field in FIELDS.items() if door in field.doors]
    subject = "prompt" if door is Door.COMPLETIONS else "messages"
    body: Any = {subject: PLAUSIBLE[subject][0], "max_tokens": dice.choice([1, 4, 12])}
    for _ in range(dice.choice([0, 1, 1, 2, 3, 6])):
        name = dice.choice(known) if dice.random() < 0.95 else dice.choice([*FIELDS, *TEXTS])
        plausible = name in PLAUSIBLE and dice.random() < 0.7
        body[name] = dice.choice(PLAUSIBLE[name]) if plausible else _value(dice)
    if dice.random() < 0.03:
        body = _value(dice)
    data = json.dumps(body).encode()
    if dice.random() < 0.05:
        data = _spoilt(dice, data)
    return Body(door, data, dice.choice([0, 200, 2_000]) if dice.random() < 0.05 else None)


def _value(dice: random.Random, depth: int = 0) -> Any:
    kind = dice.randrange(7 if depth < 3 else 5)
    if kind == 0:
        return dice.choice([None, True, False])
    if kind == 1:
        return dice.choice(NUMBERS)
    if kind == 2:
        return dice.choice(FLOATS)
    if kind == 3:
        return dice.choice(TEXTS)
    if kind == 4:
        return str(dice.choice([*NUMBERS, *FLOATS]))
    values = [_value(dice, depth + 1) for _ in range(dice.choice([0, 1, 2, 5]))]
    return values if kind == 5 else {dice.choice(TEXTS): value for value in values}


def _spoilt(dice: random.Random, data: bytes) -> bytes:
    """Text that is no JSON any more, or no text, or too deep."""
    at = dice.randrange(len(data))
    return dice.choice(
        [
            data[:at],
            data[:at] + dice.randbytes(dice.choice([1, 4])) + data[at:],
            data + data,
            b"[" * 100_000,
            b'{"max_tokens": ' + b"9" * 5_000 + b"}",
            b"",
        ]
    )
