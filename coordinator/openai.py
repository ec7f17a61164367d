"""OpenAI request bodies, validated: JSON in, a `Query` out, or an error that names the field."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from coordinator.fields import Door, split
from coordinator.query import Conversation, Query, Sampling, Speculation
from outrider.errors import InvalidArgument

MAX_ANSWERS = 16
"""Answers to one prompt at most (`n`)."""
MAX_STOP_STRINGS = 64

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
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
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculative: SpeculativeOptions = SpeculativeOptions()
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class CompletionRequest(_Request):
    """Body of `POST /v1/completions`."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]


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
    chat_template_kwargs: dict[str, Any] = {}


class Shape(NamedTuple):
    """How the client wants the answer written.

    Attributes:
        ignored: fields of the body that are not known and have no effect.
    """

    door: Door
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    ignored: tuple[str, ...]


def parse(body: bytes, door: Door, *, strict_fields: bool, timeout_s: float | None) -> tuple[Query, Shape]:
    """Validate a request body.

    Raises:
        InvalidArgument: names the field.
    """
    values, ignored = split(_json_object(body), door, strict=strict_fields)
    request: CompletionRequest | ChatCompletionRequest
    try:
        if door is Door.CHAT:
            request = ChatCompletionRequest.model_validate(values)
        else:
            request = CompletionRequest.model_validate(values)
    except ValidationError as error:
        raise _invalid(error) from None
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidArgument("stream_options", "only means something with stream: true")
    shape = Shape(
        door=door,
        stream=request.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        return_token_ids=request.return_token_ids,
        ignored=ignored,
    )
    return _query(request, timeout_s), shape


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidArgument("body", "is nested too deeply") from None
    except ValueError as error:  # bad JSON, bad UTF-8, or a number of thousands of digits
        raise InvalidArgument("body", f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument("body", "must be a JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _query(request: CompletionRequest | ChatCompletionRequest, timeout_s: float | None) -> Query:
    max_tokens = request.max_tokens
    prompt: str | tuple[int, ...] | Conversation
    if isinstance(request, ChatCompletionRequest):
        max_tokens = max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        prompt = _conversation(request)
        prompt_field = "messages"
    else:
        prompt = _prompt(request.prompt)
        prompt_field = "prompt"
    return Query(
        model=request.model,
        prompt=prompt,
        prompt_field=prompt_field,
        sampling=Sampling(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            logit_bias=tuple((int(token_id), bias) for token_id, bias in request.logit_bias.items()),
            allowed_token_ids=tuple(request.allowed_token_ids),
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
        ),
        speculation=Speculation(**request.speculative.model_dump()),
        n=request.n,
        seed=None if request.seed is None else request.seed % 2**64,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop),
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        timeout_s=timeout_s,
    )


def _prompt(prompt: str | list[Any]) -> str | tuple[int, ...]:
    """A text, or ids; a list of one of them counts as that one."""
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InvalidArgument("prompt", f"one prompt per request is supported, got {len(prompt)}")
        return _prompt(prompt[0])
    return tuple(prompt)


def _conversation(request: ChatCompletionRequest) -> Conversation:
    asks_for_both = request.add_generation_prompt and "add_generation_prompt" in request.model_fields_set
    if request.continue_final_message and asks_for_both:
        raise InvalidArgument("continue_final_message", "cannot be combined with add_generation_prompt")
    messages = []
    for message in request.messages:
        content = message.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        messages.append({**(message.model_extra or {}), "role": message.role, "content": content})
    return Conversation(
        messages=tuple(messages),
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        variables=request.chat_template_kwargs,
    )


def _invalid(error: ValidationError) -> InvalidArgument:
    """The first problem; of a union's branches the message of the first one is shown."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = [str(part) for part in first["loc"]]
    if not path:
        return InvalidArgument("body", first["msg"])
    where = [part for part in path[1:] if part.isdigit() or part.isidentifier()]
    detail = first["msg"][0].lower() + first["msg"][1:]
    if first["type"] == "missing":
        detail = "is required"
    return InvalidArgument(".".join([path[0], *where]) if path[0] == "speculative" else path[0], detail)
