"""OpenAI request bodies as pydantic models: types and ranges of the honoured fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from coordinator.structure import Choices, Regex, ResponseFormat, Schema, StructuredOutputs
from outrider.logprobs import MAX_LOGPROBS

MAX_ANSWERS = 16
"""Answers to one prompt at most (`n`)."""
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 256
MAX_CACHE_SALT = 1_024
MAX_CHOICES = 256
"""Answers to all prompts of one request at most."""

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Tops = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Field(min_length=1)]


class _Body(BaseModel):
    """Strict: a number written as text, or a boolean in place of a number, is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class StreamOptions(_Body):
    """What a stream carries beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SpeculativeOptions(_Body):
    """Speculation for this request; unset values are the server's."""

    enabled: bool | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, le=255)] | None = None
    method: Literal["auto", "standard", "coupled"] | None = None
    planted_error: Literal["shared-noise", "raw-q", "row-shift", "drop-after-look"] | None = None


class _Request(_Body):
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: FiniteFloat | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")], FiniteFloat] = {}
    allowed_token_ids: list[TokenId] = []
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] = []
    prompt_logprobs: Tops | None = None
    truncate_prompt_tokens: Literal[-1] | Annotated[int, Field(ge=1, lt=2**31)] | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculative: SpeculativeOptions = SpeculativeOptions()
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None


class CompletionRequest(_Request):
    """Body of `POST /v1/completions`."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    logprobs: Tops | None = None


class TextPart(_Body):
    """A piece of a message's content; only text is taken."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One turn; further keys reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart] | None = None


class ChatCompletionRequest(_Request):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] = []
    echo: Literal[False] = False
    logprobs: bool = False
    parallel_tool_calls: bool = True
    reasoning_effort: Annotated[str, Field(min_length=1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    tools: list[dict[str, Any]] = []
    top_logprobs: Tops = 0
