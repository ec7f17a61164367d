"""From a query to decoding requests: tokenise, fill in defaults, check limits. Runs on a worker thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from coordinator.query import Conversation, Query
from coordinator.request import DecodingRequest
from coordinator.served import COMPLETION_MAX_TOKENS, ServedModel, UnknownModel
from coordinator.text import AnswerText
from outrider.errors import InvalidArgument
from outrider.sampling import Form, Rule, SamplingParams

Number = TypeVar("Number", int, float)

SEEDED_RULE = {"auto": Rule.COUPLED, "standard": Rule.STANDARD, "coupled": Rule.COUPLED}
UNSEEDED_RULE = {"auto": Rule.STANDARD, "standard": Rule.STANDARD, "coupled": Rule.COUPLED}
"""The rule by `rejection_sample_method`. A seeded request wants its text again, which only the coupled rule promises
whatever the draft does; an unseeded one gets the rule with the highest acceptance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the operator decided for requests that do not say.

    Attributes:
        rejection_sample_method: "auto", "standard" or "coupled".
        form: what crosses the wire under the standard rule.
        request_timeout_s: a request ends after this many seconds at the latest.
    """

    rejection_sample_method: str = "auto"
    form: Form = Form.SPARSE
    request_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A query that can be decoded: one request and one text per answer wanted, and the model's end-of-sequence ids."""

    requests: tuple[DecodingRequest, ...]
    texts: tuple[AnswerText, ...]
    eos_ids: frozenset[int]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.requests[0].prompt_ids

    @property
    def timeout_s(self) -> float:
        return self.requests[0].deadline_s


def prepare(query: Query, model: ServedModel, policy: Policy) -> Prepared:
    """Check a query against the model and lay out its answers.

    Raises:
        UnknownModel: another model is asked for.
        InvalidArgument: names the field.
    """
    if query.model and query.model != model.name:
        raise UnknownModel(query.model, model.name)
    prompt_ids = _prompt_ids(query, model)
    params = _params(query, model, room=model.max_model_len - len(prompt_ids))
    rules = UNSEEDED_RULE if query.seed is None else SEEDED_RULE
    requests, texts = [], []
    for index in range(query.n):
        text = AnswerText(
            model.tokenizer.detokenizer(prompt_ids, skip_special_tokens=query.skip_special_tokens),
            stop=query.stop,
            stop_ids=frozenset(params.stop_token_ids),
            min_tokens=params.min_tokens,
            include_stop=query.include_stop,
        )
        request = DecodingRequest(
            prompt_ids=prompt_ids,
            params=params,
            seed=query.seed,
            rule=rules[query.speculation.method or policy.rejection_sample_method],
            form=policy.form,
            num_speculative_tokens=_num_speculative_tokens(query, model),
            sample_index=index,
            deadline_s=min(policy.request_timeout_s, query.timeout_s or policy.request_timeout_s),
            cut_text=text.cut if query.stop else None,
        )
        requests.append(request)
        texts.append(text)
    return Prepared(tuple(requests), tuple(texts), model.eos_ids)


def _prompt_ids(query: Query, model: ServedModel) -> tuple[int, ...]:
    field = query.prompt_field
    if isinstance(query.prompt, tuple):
        _check_ids(field, query.prompt, model)
        ids = query.prompt
    else:
        try:
            ids = tuple(_encode(query.prompt, model))
        except UnicodeError:
            raise InvalidArgument(field, "holds half of a surrogate pair, which is no text") from None
    if not ids:
        raise InvalidArgument(field, "is empty")
    if len(ids) >= model.max_model_len:
        raise InvalidArgument(
            field, f"has {len(ids)} tokens; at most {model.max_model_len - 1} leave room for an answer"
        )
    return ids


def _encode(prompt: str | Conversation, model: ServedModel) -> list[int]:
    if isinstance(prompt, Conversation):
        return model.tokenizer.encode_chat(
            prompt.messages,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            variables=prompt.variables,
        )
    return model.tokenizer.encode(prompt) if prompt else []


def _params(query: Query, model: ServedModel, *, room: int) -> SamplingParams:
    asked, defaults = query.sampling, model.defaults
    _check_ids("logit_bias", (token for token, _ in asked.logit_bias), model)
    _check_ids("allowed_token_ids", asked.allowed_token_ids, model)
    _check_ids("stop_token_ids", asked.stop_token_ids, model)
    stop_ids = set(asked.stop_token_ids)
    if not asked.ignore_eos:
        stop_ids |= model.eos_ids
    # A stop string that is written like a special token never appears in a text without special tokens.
    stop_ids |= {token for text in query.stop if (token := model.tokenizer.special_id(text)) is not None}
    max_tokens = asked.max_tokens
    if max_tokens is None:
        in_chat = isinstance(query.prompt, Conversation)
        max_tokens = (defaults.max_new_tokens or room) if in_chat else COMPLETION_MAX_TOKENS
    elif max_tokens < 1:  # before it is cut to the room, where the message would name another number
        raise InvalidArgument("max_tokens", f"must be at least 1, got {max_tokens}")
    return SamplingParams(
        temperature=_first(asked.temperature, defaults.temperature),
        top_k=_first(asked.top_k, defaults.top_k),
        top_p=_first(asked.top_p, defaults.top_p),
        min_p=_first(asked.min_p, defaults.min_p),
        presence_penalty=_first(asked.presence_penalty, 0.0),
        frequency_penalty=_first(asked.frequency_penalty, 0.0),
        repetition_penalty=_first(asked.repetition_penalty, defaults.repetition_penalty),
        logit_bias=asked.logit_bias,
        allowed_token_ids=asked.allowed_token_ids,
        min_tokens=_first(asked.min_tokens, 0),
        stop_token_ids=tuple(sorted(stop_ids)),
        max_tokens=min(max_tokens, room),
    )


def _num_speculative_tokens(query: Query, model: ServedModel) -> int | None:
    wanted = query.speculation
    number = wanted.num_speculative_tokens
    if number is not None and number > model.max_speculative_tokens:
        raise InvalidArgument(
            "num_speculative_tokens", f"must be from 0 to {model.max_speculative_tokens}, got {number}"
        )
    return 0 if wanted.enabled is False else number


def _check_ids(field: str, ids: Iterable[int], model: ServedModel) -> None:
    for token in ids:
        if not 0 <= token < model.vocabulary:
            raise InvalidArgument(field, f"id {token} is out of range; the vocabulary has {model.vocabulary} ids")


def _first(asked: Number | None, default: Number) -> Number:
    """The asked value, which may be 0, else the default."""
    return default if asked is None else asked
