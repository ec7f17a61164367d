"""Every request field of the OpenAI-compatible API that is known, and how it is treated: the one table.

*Honoured* fields are validated by the models of `coordinator.openai`. Fields *without effect* say something to the
operator or the caller but never change the text. *Refused* fields would change the answer and are not built: they get
400 unless they have a value that asks for nothing. Null always means that a field is not set. Fields that are not in
the table are accepted without effect and named in a response header, or get 400 where the server is strict.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from outrider.errors import InvalidArgument


class Door(Enum):
    """The two endpoints."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class Treatment(Enum):
    """What happens to a field."""

    HONOURED = "honoured"
    WITHOUT_EFFECT = "accepted without effect"
    REFUSED = "refused"


class Field(NamedTuple):
    """How a field is treated.

    Attributes:
        doors: endpoints at which the field is known.
        harmless: values of a refused field that ask for nothing.
    """

    treatment: Treatment
    doors: tuple[Door, ...] = (Door.COMPLETIONS, Door.CHAT)
    harmless: tuple[Any, ...] = ()


class Split(NamedTuple):
    """A request body, sorted: what the models validate, and the names of unknown fields."""

    honoured: dict[str, Any]
    ignored: tuple[str, ...]


_COMPLETIONS = (Door.COMPLETIONS,)
_CHAT = (Door.CHAT,)


def _honoured(*names: str, doors: tuple[Door, ...] = (Door.COMPLETIONS, Door.CHAT)) -> dict[str, Field]:
    return {name: Field(Treatment.HONOURED, doors) for name in names}


def _refused(*harmless: Any, doors: tuple[Door, ...] = (Door.COMPLETIONS, Door.CHAT)) -> Field:
    return Field(Treatment.REFUSED, doors, harmless)


FIELDS: Mapping[str, Field] = {
    **_honoured("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids"),
    **_honoured("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids"),
    **_honoured("min_tokens", "ignore_eos", "stream", "stream_options", "speculative", "return_token_ids"),
    **_honoured("skip_special_tokens", "include_stop_str_in_output", "bad_words", "best_of", "add_special_tokens"),
    **_honoured("logprobs", "prompt_logprobs", "return_tokens_as_token_ids", "echo", "truncate_prompt_tokens"),
    **_honoured("cache_salt", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    **_honoured("prompt", doors=_COMPLETIONS),
    **_honoured("messages", "max_completion_tokens", "add_generation_prompt", "continue_final_message", doors=_CHAT),
    **_honoured("top_logprobs", "tools", "tool_choice", "documents", "reasoning_effort", doors=_CHAT),
    **_honoured("chat_template", "chat_template_kwargs", "parallel_tool_calls", doors=_CHAT),
    **{
        name: Field(Treatment.WITHOUT_EFFECT)
        for name in (
            "user",
            "metadata",
            "store",
            "service_tier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "prediction",
            "request_id",
        )
    },
    "suffix": _refused("", doors=_COMPLETIONS),
    "use_beam_search": _refused(False),
    "length_penalty": _refused(1, 1.0),
    "guided_grammar": _refused(),
    "logits_processors": _refused([]),
    "prompt_embeds": _refused(),
    "functions": _refused([], doors=_CHAT),
    "function_call": _refused("none", "auto", doors=_CHAT),
    "modalities": _refused(["text"], doors=_CHAT),
    "audio": _refused(doors=_CHAT),
    "web_search_options": _refused(doors=_CHAT),
    "verbosity": _refused("medium", doors=_CHAT),
}


def split(body: Mapping[str, Any], door: Door, *, strict: bool = False) -> Split:
    """Sort a request body by the table.

    Args:
        strict: whether unknown fields are refused.

    Raises:
        InvalidArgument: a field that would change the answer and is not built; or, where `strict`, an unknown one.
    """
    honoured: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        field = FIELDS.get(name)
        if field is None or door not in field.doors:
            if strict:
                raise InvalidArgument(name, "unknown field")
            ignored.append(name)
        elif value is None or field.treatment is Treatment.WITHOUT_EFFECT:
            continue
        elif field.treatment is Treatment.HONOURED:
            honoured[name] = value
        elif not any(_same(value, harmless) for harmless in field.harmless):
            raise InvalidArgument(name, "is not supported by this server")
    return Split(honoured, tuple(ignored))


def _same(value: Any, harmless: Any) -> bool:
    return type(value) is type(harmless) and value == harmless
