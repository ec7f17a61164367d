"""Which tools a chat must or may call: `tool_choice` and `parallel_tool_calls`.

"required" and a named function are kept by a grammar, so the answer is calls that can be read, and nothing else. Under
"auto" the model may say anything; `parallel_tool_calls: false` then ends the answer behind its first call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from coordinator.bodies import ChatCompletionRequest
from outrider.errors import InvalidArgument
from outrider.grammar import Grammar, GrammarKind

FIELD = "tool_choice"


class ToolChoice(NamedTuple):
    """What follows from a chat's tools.

    Attributes:
        offered: whether the model is told of the tools, and its calls are read.
        grammar: what the answer must match, or None.
        ends_behind_call: whether the first call ends the answer, without a grammar.
    """

    offered: bool
    grammar: Grammar | None = None
    ends_behind_call: bool = False


def tool_choice(request: ChatCompletionRequest) -> ToolChoice:
    """
    Raises:
        InvalidArgument: a call is asked for that cannot be made.
    """
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        offered = bool(request.tools) and choice != "none"
        return ToolChoice(offered, ends_behind_call=offered and not request.parallel_tool_calls)
    if not request.tools:
        raise InvalidArgument(FIELD, "asks for a call, and there are no tools")
    functions = dict(_function(tool) for tool in request.tools)
    if isinstance(choice, dict):
        name = _named(choice)
        if name not in functions:
            raise InvalidArgument(FIELD, f"names {name!r}, which is not among the tools")
        functions = {name: functions[name]}
    several = choice == "required" and request.parallel_tool_calls
    return ToolChoice(True, _grammar(functions, several=several))


def _grammar(functions: dict[str, Any], *, several: bool) -> Grammar:
    try:
        return Grammar(GrammarKind.TOOL_CALLS, json.dumps({"functions": functions, "several": several}))
    except InvalidArgument as error:
        raise InvalidArgument("tools", error.problem) from None


def _named(choice: dict[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise InvalidArgument(FIELD, 'must be none, auto, required, or {"type": "function", "function": {"name": ...}}')
    return name


def _function(tool: dict[str, Any]) -> tuple[str, Any]:
    """Name, and the schema of the arguments; none means any."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise InvalidArgument("tools", "must be functions with a name where one is to be called")
    return name, function.get("parameters")
