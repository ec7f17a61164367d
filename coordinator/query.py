"""What a client asks for, the same whichever door it came through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.grammar import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A chat prompt, to be rendered by the model's template.

    Attributes:
        variables: what the template may read beside the messages: tools, documents, and the client's own.
        template: replaces the model's own, or None.
    """

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None


Prompt = str | tuple[int, ...] | Conversation


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
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The request's own wishes about speculation; None leaves it to the server.

    Attributes:
        method: "auto", "standard" or "coupled".
        planted_error: label of an error on purpose (`outrider.planted`).
    """

    enabled: bool | None = None
    num_speculative_tokens: int | None = None
    method: str | None = None
    planted_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One request.

    Attributes:
        model: the name asked for, or None for the only one.
        prompts: each a text, token ids, or a conversation; at least one.
        prompt_field: how the client calls them, for error messages.
        grammar_field: how the client calls `sampling.grammar`, for error messages.
        n: answers wanted to each.
        seed: of all randomness, below 2^64, or None for a random one.
        stop: texts at which an answer ends.
        last_words: texts behind which an answer ends, and which belong to it.
        bad_words: texts that no answer holds.
        logprobs: most probable ids wanted beside each token's log-probability; None for no log-probabilities.
        prompt_logprobs: the same for the prompt's tokens.
        echo: whether an answer begins with its prompt.
        truncate_prompt_tokens: last tokens of a prompt that are kept; -1 keeps what leaves room for the answer.
        add_special_tokens: whether the tokenizer adds its own to a prompt; None for texts only.
        cache_salt: requests share the computed state of equal prompts only where this and the tenant are equal.
        client: takes turns with others: the name of the API key, or empty where none is asked for.
        tenant: what tells one client's requests from another's: the key that they come with, or empty.
        timeout_s: the client's own limit, or None.
        request_id: by which answer and log name the request.
        traceparent: the client's W3C trace context, or empty; one that makes no sense counts as none.
    """

    model: str | None
    prompts: tuple[Prompt, ...]
    prompt_field: str
    sampling: Sampling = Sampling()
    speculation: Speculation = Speculation()
    grammar_field: str = "grammar"
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    last_words: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    client: str = ""
    tenant: str = ""
    timeout_s: float | None = None
    request_id: str = ""
    traceparent: str = ""
