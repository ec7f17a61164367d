"""A chat request's messages and options as the chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coordinator.bodies import ChatCompletionRequest, ChatMessage
from coordinator.query import Conversation
from outrider.errors import InvalidArgument


def conversation(request: ChatCompletionRequest) -> Conversation:
    """
    Raises:
        InvalidArgument: naming the field that contradicts another one or is not built.
    """
    asks_for_both = request.add_generation_prompt and "add_generation_prompt" in request.model_fields_set
    if request.continue_final_message and asks_for_both:
        raise InvalidArgument("continue_final_message", "cannot be combined with add_generation_prompt")
    return Conversation(
        messages=tuple(_message(message) for message in request.messages),
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        variables={**_variables(request), **request.chat_template_kwargs},
        template=request.chat_template,
    )


def _variables(request: ChatCompletionRequest) -> dict[str, Any]:
    """What the template may read beside the messages."""
    variables: dict[str, Any] = {}
    if request.tools and request.tool_choice != "none":
        variables["tools"] = request.tools
    if request.documents:
        variables["documents"] = request.documents
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    return variables


def _message(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    more = dict(message.model_extra or {})
    if more.get("tool_calls") is not None:
        more["tool_calls"] = _calls(more["tool_calls"])
    return {**more, "role": message.role, "content": content}


def _calls(calls: Any) -> list[Any]:
    """Tool calls with their arguments as objects: clients send them as JSON text, templates expect what it says."""
    if not isinstance(calls, list):
        raise InvalidArgument("messages", "tool_calls must be a list")
    return [_call(call) for call in calls]


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        raise InvalidArgument("messages", "the arguments of a tool call are not JSON") from None
    return {**call, "function": {**function, "arguments": value}}
