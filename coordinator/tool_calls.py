"""Tool calls in an answer's text, in the form that Hermes and Qwen templates teach: JSON between `<tool_call>` tags.

The text comes in pieces of any size. What cannot be read as a call stays text, as it was written.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from coordinator.chat_template import ChatTemplate

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def writes_calls(template: ChatTemplate | None) -> bool:
    """Whether a model that follows this template writes calls in the form that is read here."""
    return template is not None and OPEN_TAG in template.source


def closes_call(text: str) -> bool:
    """Whether a closing tag behind this text would end a call, and does not lie in one of its strings."""
    return '"' not in _STRING.sub("", text.rpartition(OPEN_TAG)[2])


@dataclass(slots=True)
class Parsed:
    """What a piece of text came to: text that is no call, and calls as OpenAI writes them."""

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class ToolCallReader:
    """Reads one answer.

    Space between a call and its neighbours belongs to neither. A call is given out when it is complete.

    Attributes:
        calls: given out so far.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._held = ""
        self._space = ""
        """Before the call that is being read, in case it is none."""
        self._in_call = False
        self._behind_call = False

    def feed(self, text: str, *, last: bool) -> Parsed:
        """Takes the next piece; with the last one also what was held back."""
        parsed = Parsed()
        self._held += text
        while self._read_call(parsed, last=last) if self._in_call else self._read_text(parsed, last=last):
            pass
        return parsed

    def _read_text(self, parsed: Parsed, *, last: bool) -> bool:
        """Text up to the next call; True if there is one."""
        at = self._held.find(OPEN_TAG)
        if at >= 0:
            before, self._held = self._held[:at], self._held[at + len(OPEN_TAG) :]
            said = before.rstrip()
            self._space, self._in_call = before[len(said) :], True
            self._say(parsed, said)
            return True
        certain = self._held if last else self._held[: len(self._held) - _beginning(self._held)].rstrip()
        self._held = self._held[len(certain) :]
        self._say(parsed, certain)
        return False

    def _read_call(self, parsed: Parsed, *, last: bool) -> bool:
        """A call up to its end; True if it ends."""
        at = _end(self._held, last=last)
        if at < 0 and not last:
            return False
        body, tag = (self._held, "") if at < 0 else (self._held[:at], CLOSE_TAG)
        self._held = self._held[len(body) + len(tag) :]
        self._in_call = False
        function = _function(body)
        if function is None:
            self._say(parsed, self._space + OPEN_TAG + body + tag)
        else:
            call = {"index": self.calls, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            parsed.calls.append({**call, "function": function})
            self.calls += 1
            self._behind_call = True
        return bool(tag)

    def _say(self, parsed: Parsed, text: str) -> None:
        if self._behind_call:
            text = text.lstrip()
        if text:
            self._behind_call = False
            parsed.content += text


def _end(text: str, *, last: bool) -> int:
    """Where the tag behind a call begins, or -1. One inside a string is an argument's text, if that string ends."""
    first = at = text.find(CLOSE_TAG)
    while at >= 0 and '"' in _STRING.sub("", text[:at]):
        at = text.find(CLOSE_TAG, at + 1)
    return first if at < 0 and last else at


def _beginning(text: str) -> int:
    """Characters at the end that may begin a call."""
    return next((n for n in range(len(OPEN_TAG) - 1, 0, -1) if text.endswith(OPEN_TAG[:n])), 0)


def _function(body: str) -> dict[str, str] | None:
    """Name and arguments of a call, or None for what is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": value["name"], "arguments": arguments} if isinstance(arguments, str) else None
