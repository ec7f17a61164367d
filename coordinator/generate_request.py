"""GenerateRequest, validated: protobuf in, a `Query` out, or an error that names the field."""

from __future__ import annotations

import json
from typing import Any

from coordinator.bodies import MAX_ANSWERS, MAX_BAD_WORDS, MAX_CACHE_SALT, MAX_CHOICES, MAX_STOP_STRINGS
from coordinator.query import Conversation, Prompt, Query, Sampling, Speculation
from outrider.errors import InvalidArgument
from outrider.logprobs import MAX_LOGPROBS
from outrider.rpc.stream_codec import grammar_from_pb
from outrider.v1 import common_pb2, coordinator_pb2

_METHODS = {
    common_pb2.ACCEPTANCE_RULE_UNSPECIFIED: None,
    common_pb2.ACCEPTANCE_RULE_STANDARD: "standard",
    common_pb2.ACCEPTANCE_RULE_COUPLED: "coupled",
}
_OPTIONAL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_tokens",
)


def query_from_pb(request: coordinator_pb2.GenerateRequest, timeout_s: float | None) -> Query:
    """
    Args:
        timeout_s: seconds until the call's own deadline, or None.

    Raises:
        InvalidArgument: names the field.
    """
    prompts, field = _prompts(request)
    speculation = request.speculation
    if speculation.rule not in _METHODS:
        raise InvalidArgument("rule", f"unknown acceptance rule {speculation.rule}")
    _check_texts(request)
    _check_numbers(request)
    return Query(
        model=request.model or None,
        prompts=prompts,
        prompt_field=field,
        sampling=_sampling(request),
        speculation=Speculation(
            enabled=speculation.enabled if speculation.HasField("enabled") else None,
            num_speculative_tokens=(
                speculation.num_speculative_tokens if speculation.HasField("num_speculative_tokens") else None
            ),
            method=_METHODS[speculation.rule],
        ),
        n=request.n if request.HasField("n") else 1,
        seed=request.seed if request.HasField("seed") else None,
        stop=tuple(request.stop),
        bad_words=tuple(request.bad_words),
        logprobs=_optional(request, "logprobs"),
        prompt_logprobs=_optional(request, "prompt_logprobs"),
        echo=request.echo,
        truncate_prompt_tokens=_optional(request, "truncate_prompt_tokens"),
        add_special_tokens=_optional(request, "add_special_tokens"),
        include_stop=request.include_stop,
        skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
        cache_salt=request.cache_salt,
        timeout_s=timeout_s,
    )


def _optional(request: coordinator_pb2.GenerateRequest, name: str) -> Any:
    return getattr(request, name) if request.HasField(name) else None


def _check_texts(request: coordinator_pb2.GenerateRequest) -> None:
    if len(request.cache_salt) > MAX_CACHE_SALT:
        raise InvalidArgument("cache_salt", f"has {len(request.cache_salt)} characters; at most {MAX_CACHE_SALT}")
    for name, most in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
        texts = getattr(request, name)
        if any(not text for text in texts):
            raise InvalidArgument(name, "holds an empty string")
        if len(texts) > most:
            raise InvalidArgument(name, f"has {len(texts)} texts; at most {most} are taken")


def _check_numbers(request: coordinator_pb2.GenerateRequest) -> None:
    for name, low, high in (("logprobs", 0, MAX_LOGPROBS), ("prompt_logprobs", 0, MAX_LOGPROBS), ("n", 1, MAX_ANSWERS)):
        value = _optional(request, name)
        if value is not None and not low <= value <= high:
            raise InvalidArgument(name, f"must be from {low} to {high}, got {value}")
    kept = _optional(request, "truncate_prompt_tokens")
    if kept is not None and (kept < -1 or kept == 0):
        raise InvalidArgument("truncate_prompt_tokens", f"must be -1 or positive, got {kept}")


def _prompts(request: coordinator_pb2.GenerateRequest) -> tuple[tuple[Prompt, ...], str]:
    field = request.WhichOneof("prompt")
    if field == "text":
        return (request.text,), field
    if field == "token_ids":
        return (tuple(request.token_ids.ids),), field
    if field == "prompts":
        several = request.prompts
        prompts = (*several.texts, *(tuple(one.ids) for one in several.token_ids))
        n = _optional(request, "n") or 1
        if not prompts or len(prompts) * n > MAX_CHOICES:
            raise InvalidArgument(field, f"{len(prompts)} prompts x n = {n} must be from 1 to {MAX_CHOICES}")
        return prompts, field
    if field == "chat":
        if not request.chat.messages:
            raise InvalidArgument(field, "is empty")
        return (_conversation(request.chat),), field
    raise InvalidArgument("prompt", "is required: one of text, token_ids, chat, prompts")


def _conversation(chat: coordinator_pb2.ChatMessages) -> Conversation:
    continues = chat.continue_final_message
    adds = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues
    if adds and continues:
        raise InvalidArgument("continue_final_message", "cannot be combined with add_generation_prompt")
    return Conversation(
        messages=tuple(
            {**_object("more_json", turn.more_json), "role": turn.role, "content": turn.content}
            for turn in chat.messages
        ),
        add_generation_prompt=adds,
        continue_final_message=continues,
        variables=_object("variables_json", chat.variables_json),
        template=chat.chat_template or None,
    )


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(field, "must be a JSON object")
    return value


def _sampling(request: coordinator_pb2.GenerateRequest) -> Sampling:
    params = request.params
    given = {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    return Sampling(
        **given,
        min_tokens=params.min_tokens,
        logit_bias=tuple((bias.token_id, bias.bias) for bias in params.logit_bias),
        allowed_token_ids=tuple(params.allowed_token_ids),
        stop_token_ids=tuple(params.stop_token_ids),
        bad_word_ids=tuple(tuple(word.ids) for word in params.bad_words),
        ignore_eos=request.ignore_eos,
        grammar=grammar_from_pb(params),
    )
