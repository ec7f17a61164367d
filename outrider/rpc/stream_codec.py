"""StreamOpen and SamplingParams to and from protobuf."""

from __future__ import annotations

from typing import Any, TypeVar

from outrider.errors import InvalidArgument
from outrider.grammar import Grammar, GrammarKind
from outrider.logprobs import MAX_LOGPROBS
from outrider.planted import Plant
from outrider.sampling import Form, Rule, SamplingParams
from outrider.seam import StreamOpen
from outrider.v1 import common_pb2 as pb

_OPTIONAL = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_tokens",
)
_SMALLEST_TOP_P = 1e-37  # what a float32 field still tells from 0, which top_p must not be
_LARGEST_SAMPLE_INDEX = 65_535
_LONGEST_TRACEPARENT = 256
_DEFAULT_DEADLINE_MS = StreamOpen(stream_id=0, prompt_length=1, params=SamplingParams()).deadline_ms

E = TypeVar("E", Rule, Form, Plant)


def params_to_pb(params: SamplingParams) -> pb.SamplingParams:
    """Every field is set, so that the reader's defaults never matter."""
    return pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=max(params.top_p, _SMALLEST_TOP_P),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=[pb.TokenBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
        allowed_token_ids=params.allowed_token_ids,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        max_tokens=params.max_tokens,
        bad_words=[pb.TokenSequence(ids=word) for word in params.bad_words],
        grammar=_grammar_to_pb(params.grammar),
    )


def params_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Absent fields take the defaults of `SamplingParams`.

    Raises:
        InvalidArgument: naming the field that is out of its range.
    """
    given: dict[str, Any] = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    return SamplingParams(
        logit_bias=tuple((bias.token_id, bias.bias) for bias in message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        grammar=grammar_from_pb(message),
        **given,
    )


def _grammar_to_pb(grammar: Grammar | None) -> pb.Grammar | None:
    if grammar is None:
        return None
    return pb.Grammar(kind=pb.GrammarKind.ValueType(grammar.kind), text=grammar.text)


def grammar_from_pb(message: pb.SamplingParams) -> Grammar | None:
    """The grammar of a stream or a request, if it has one.

    Raises:
        InvalidArgument: it is of no known kind, empty or too long.
    """
    if not message.HasField("grammar"):
        return None
    try:
        kind = GrammarKind(message.grammar.kind)
    except ValueError:
        raise InvalidArgument("grammar", f"unknown kind {message.grammar.kind}") from None
    return Grammar(kind, message.grammar.text)


def open_to_pb(stream: StreamOpen) -> pb.StreamOpen:
    """The caller leaves out the keys that the receiving service must not know (0)."""
    return pb.StreamOpen(
        stream_id=stream.stream_id,
        fork_of=stream.fork_of,
        prompt_length=stream.prompt_length,
        params=params_to_pb(stream.params),
        rule=pb.AcceptanceRule.ValueType(stream.rule),
        form=pb.WireForm.ValueType(stream.form),
        draft_key=stream.draft_key,
        emit_key=stream.emit_key,
        gumbel_key=stream.gumbel_key,
        sample_index=stream.sample_index,
        logprobs=stream.logprobs,
        prompt_logprobs=stream.prompt_logprobs,
        deadline_ms=stream.deadline_ms,
        planted_error=pb.PlantedError.ValueType(stream.planted),
        cache_salt=stream.cache_salt,
        traceparent=stream.traceparent,
    )


def open_from_pb(message: pb.StreamOpen) -> StreamOpen:
    """
    Raises:
        InvalidArgument: naming the field that is out of its range.
    """
    if message.prompt_length < 1:
        raise InvalidArgument("prompt_length", "must be at least 1")
    if message.sample_index > _LARGEST_SAMPLE_INDEX:
        raise InvalidArgument("sample_index", f"must be at most {_LARGEST_SAMPLE_INDEX}, got {message.sample_index}")
    return StreamOpen(
        stream_id=message.stream_id,
        prompt_length=message.prompt_length,
        params=params_from_pb(message.params),
        rule=_enum("rule", message.rule, Rule.STANDARD),
        form=_enum("form", message.form, Form.SPARSE),
        draft_key=message.draft_key,
        emit_key=message.emit_key,
        gumbel_key=message.gumbel_key,
        sample_index=message.sample_index,
        fork_of=message.fork_of if message.HasField("fork_of") else None,
        logprobs=_tops(message, "logprobs"),
        prompt_logprobs=_tops(message, "prompt_logprobs"),
        deadline_ms=message.deadline_ms or _DEFAULT_DEADLINE_MS,
        planted=_enum("planted_error", message.planted_error, Plant.NONE),
        cache_salt=message.cache_salt,
        traceparent=_within("traceparent", message.traceparent, _LONGEST_TRACEPARENT),
    )


def _tops(message: pb.StreamOpen, name: str) -> int | None:
    """How many alternatives are wanted, if any are."""
    if not message.HasField(name):
        return None
    wanted: int = getattr(message, name)
    if wanted > MAX_LOGPROBS:
        raise InvalidArgument(name, f"must be at most {MAX_LOGPROBS}, got {wanted}")
    return wanted


def _within(name: str, text: str, most: int) -> str:
    if len(text) > most:
        raise InvalidArgument(name, f"must have at most {most} characters, has {len(text)}")
    return text


def _enum(name: str, value: int, default: E) -> E:
    """The enum member of a field; 0 is the default, and a value from a newer peer is refused rather than guessed."""
    if value == 0:
        return default
    try:
        return type(default)(value)
    except ValueError:
        raise InvalidArgument(name, f"unknown value {value}") from None
