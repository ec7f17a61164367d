"""What a client asks for, the same whichever door it came through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A chat prompt, to be rendered by the model's template."""

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling values as asked for; None means not set, which is never the same as 0."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The request's own wishes about speculation; None leaves it to the server.

    Attributes:
        method: "auto", "standard" or "coupled".
    """

    enabled: bool | None = None
    num_speculative_tokens: int | None = None
    method: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One request.

    Attributes:
        model: the name asked for, or None for the only one.
        prompt: text, token ids, or a conversation.
        prompt_field: how the client calls it, for error messages.
        n: answers wanted.
        seed: of all randomness, below 2^64, or None for a random one.
        stop: texts at which an answer ends.
        timeout_s: the client's own limit, or None.
    """

    model: str | None
    prompt: str | tuple[int, ...] | Conversation
    prompt_field: str
    sampling: Sampling = Sampling()
    speculation: Speculation = Speculation()
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    timeout_s: float | None = None
