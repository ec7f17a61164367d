"""OpenAI request bodies, validated: JSON in, a `Query` out, or an error that names the field."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, NoReturn

from pydantic import ValidationError

from coordinator.bodies import MAX_CHOICES, ChatCompletionRequest, CompletionRequest
from coordinator.conversation import conversation
from coordinator.fields import Door, split
from coordinator.query import Prompt, Query, Sampling, Speculation
from coordinator.structure import Structure, structure
from coordinator.tool_calls import CLOSE_TAG
from coordinator.tool_choice import FIELD as TOOL_CHOICE
from coordinator.tool_choice import ToolChoice, tool_choice
from outrider.errors import InvalidArgument


class Shape(NamedTuple):
    """How the client wants the answer written.

    Attributes:
        ignored: fields of the body that are not known and have no effect.
        logprobs, prompt_logprobs: most probable ids to be shown; None for no log-probabilities.
        reads_calls: whether tool calls in the text are given out as such.
        tokens_as_ids: whether log-probabilities name tokens by id, for texts that two of them share.
    """

    door: Door
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    ignored: tuple[str, ...]
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    reads_calls: bool = False


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
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs", "are not part of a stream; with echo, logprobs are")
    tools = tool_choice(request) if isinstance(request, ChatCompletionRequest) else ToolChoice(False)
    shape = Shape(
        door=door,
        stream=request.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        return_token_ids=request.return_token_ids,
        ignored=ignored,
        logprobs=_logprobs(request),
        prompt_logprobs=request.prompt_logprobs,
        reads_calls=tools.offered,
        tokens_as_ids=request.return_tokens_as_token_ids,
    )
    return _query(request, shape, tools, timeout_s), shape


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


def _logprobs(request: CompletionRequest | ChatCompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if not request.logprobs and request.top_logprobs:
        raise InvalidArgument("top_logprobs", "only means something with logprobs: true")
    return request.top_logprobs if request.logprobs else None


def _query(
    request: CompletionRequest | ChatCompletionRequest, shape: Shape, tools: ToolChoice, timeout_s: float | None
) -> Query:
    if request.best_of not in (None, request.n):
        raise InvalidArgument("best_of", f"must be n ({request.n}): answers are not ranked")
    max_tokens = request.max_tokens
    prompts: tuple[Prompt, ...]
    if isinstance(request, ChatCompletionRequest):
        max_tokens = max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        prompts = (conversation(request),)
        prompt_field = "messages"
    else:
        prompts = _prompts(request.prompt)
        prompt_field = "prompt"
    if len(prompts) * request.n > MAX_CHOICES:
        raise InvalidArgument(
            prompt_field, f"{len(prompts)} prompts x n = {request.n} are more than {MAX_CHOICES} answers"
        )
    form = structure(
        request.response_format,
        request.structured_outputs,
        request.guided_json,
        request.guided_regex,
        request.guided_choice,
    )
    if tools.grammar is not None:
        if form is not None:
            raise InvalidArgument(TOOL_CHOICE, f"makes the answer a call, and {form.field} sets another form")
        form = Structure(tools.grammar, TOOL_CHOICE)
    return Query(
        model=request.model,
        prompts=prompts,
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
            grammar=form and form.grammar,
        ),
        grammar_field=form.field if form else "grammar",
        speculation=Speculation(**request.speculative.model_dump()),
        n=request.n,
        seed=None if request.seed is None else request.seed % 2**64,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop),
        last_words=(CLOSE_TAG,) if tools.ends_behind_call else (),
        bad_words=tuple(request.bad_words),
        logprobs=shape.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        echo=request.echo,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        add_special_tokens=request.add_special_tokens,
        cache_salt=request.cache_salt or "",
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        timeout_s=timeout_s,
    )


def _prompts(prompt: str | list[Any]) -> tuple[Prompt, ...]:
    """A text, ids, or a list of either."""
    if isinstance(prompt, str):
        return (prompt,)
    if prompt and isinstance(prompt[0], str | list):
        return tuple(one if isinstance(one, str) else tuple(one) for one in prompt)
    return (tuple(prompt),)


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
