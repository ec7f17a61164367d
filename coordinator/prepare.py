"""From a query to decoding requests: tokenise, fill in defaults, check limits. Runs on a worker thread."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from coordinator.prompts import Echo, check_ids, echo, prompt_ids
from coordinator.query import Conversation, Query
from coordinator.request import DecodingRequest
from coordinator.served import COMPLETION_MAX_TOKENS, ServedModel, UnknownModel
from coordinator.state import prompt_hashes
from coordinator.synthetic import METHOD
from coordinator.text import AnswerText
from coordinator.tool_calls import closes_call, writes_calls
from coordinator.tool_choice import FIELD as TOOL_CHOICE
from outrider.errors import InvalidArgument
from outrider.guidance import problem
from outrider.planted import Plant
from outrider.sampling import Form, Rule, SamplingParams

MOST_PROMPT_LOGPROBS = 1 << 20
"""Of one answer; each is an object of its own until they are written."""

Number = TypeVar("Number", int, float)

SEEDED_RULE = {"auto": Rule.COUPLED, "standard": Rule.STANDARD, "coupled": Rule.COUPLED, METHOD: Rule.STANDARD}
UNSEEDED_RULE = {**SEEDED_RULE, "auto": Rule.STANDARD}
"""The rule by `rejection_sample_method`. A seeded request wants its text again, which only the coupled rule promises
whatever the draft does; an unseeded one gets the rule with the highest acceptance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the operator decided for requests that do not say.

    Attributes:
        rejection_sample_method: "auto", "standard" or "coupled"; "synthetic" holds for all requests, whatever they say.
        synthetic_acceptance: chance of a slot to be accepted under "synthetic", and only there.
        form: what crosses the wire under the standard rule.
        request_timeout_s: a request ends after this many seconds at the latest.
        trust_request_chat_template: whether a request may bring a template of its own. Templates run in a sandbox, but
            one that loops keeps a thread busy.
    """

    rejection_sample_method: str = "auto"
    synthetic_acceptance: float | None = None
    form: Form = Form.SPARSE
    request_timeout_s: float = 600.0
    trust_request_chat_template: bool = False

    def __post_init__(self) -> None:
        rate = self.synthetic_acceptance
        if (rate is not None) != (self.rejection_sample_method == METHOD):
            raise InvalidArgument(
                "rejection_sample_method",
                "synthetic is for measuring only and serves no text; it and synthetic_acceptance need each other",
            )
        if rate is not None and not 0 <= rate <= 1:
            raise InvalidArgument("synthetic_acceptance", f"must be from 0 to 1, got {rate}")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A query that can be decoded.

    Attributes:
        requests, texts: one per answer wanted: those to the first prompt, then those to the second.
        prompts: ids of each prompt.
        n: answers to each.
        eos_ids: the model's end-of-sequence ids.
        echoes: by prompt, or empty without an echo.
        prompt_only: whether no token is wanted: the one that is drawn all the same is dropped.
    """

    requests: tuple[DecodingRequest, ...]
    texts: tuple[AnswerText, ...]
    prompts: tuple[tuple[int, ...], ...]
    n: int
    eos_ids: frozenset[int]
    echoes: tuple[Echo, ...] = ()
    prompt_only: bool = False

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
    if not policy.trust_request_chat_template and any(
        isinstance(prompt, Conversation) and prompt.template is not None for prompt in query.prompts
    ):
        raise InvalidArgument(
            "chat_template", "is taken only by a coordinator that was started with --trust-request-chat-template"
        )
    prompts = tuple(prompt_ids(prompt, query, model) for prompt in query.prompts)
    prompt_only = _prompt_only(query)
    _check_grammar(query, model, policy)
    bad_words = _bad_words(query, model)
    rules = UNSEEDED_RULE if query.seed is None else SEEDED_RULE
    synthetic = policy.synthetic_acceptance
    method = METHOD if synthetic is not None else query.speculation.method or policy.rejection_sample_method
    if synthetic is not None and (query.logprobs is not None or _prompt_logprobs(query) is not None):
        raise InvalidArgument("logprobs", "have no meaning where tokens are accepted at a set rate (synthetic)")
    _check_prompt_logprobs(query, prompts)
    requests, texts = [], []
    for ids in prompts:
        hashes = prompt_hashes(ids)
        group = secrets.randbits(64) if query.n > 1 else 0
        params = _params(query, model, bad_words, room=model.max_model_len - len(ids))
        for index in range(query.n):
            text = AnswerText(
                model.tokenizer.detokenizer(ids, skip_special_tokens=query.skip_special_tokens),
                stop=query.stop,
                stop_ids=frozenset(params.stop_token_ids),
                min_tokens=params.min_tokens,
                include_stop=query.include_stop,
                last_words=query.last_words,
                may_end=closes_call,
            )
            request = DecodingRequest(
                prompt_ids=ids,
                prompt_hashes=hashes,
                params=params,
                seed=query.seed,
                rule=rules[method],
                form=policy.form if synthetic is None else Form.SPARSE,
                synthetic=synthetic,
                num_speculative_tokens=_num_speculative_tokens(query, model),
                sample_index=index,
                prompt_group=group,
                cache_salt=cache_salt(query.tenant, query.cache_salt),
                deadline_s=min(policy.request_timeout_s, query.timeout_s or policy.request_timeout_s),
                cut_text=text.cut if (query.stop or query.last_words) and not prompt_only else None,
                logprobs=query.logprobs,
                prompt_logprobs=_prompt_logprobs(query),
                planted=Plant.of(query.speculation.planted_error),
            )
            requests.append(request)
            texts.append(text)
    echoes = [echo(prompt, ids, query, model) for prompt, ids in zip(query.prompts, prompts, strict=True) if query.echo]
    return Prepared(tuple(requests), tuple(texts), prompts, query.n, model.eos_ids, tuple(echoes), prompt_only)


def cache_salt(tenant: str, salt: str) -> int:
    """The 64 bits under which services find prefixes again; 0 for requests that come without a key and a salt.

    Whoever can make a service share a prefix can find out by the time it takes that another request had it. So
    requests with different keys never share one, and clients can keep theirs apart within a key.
    """
    if not tenant and not salt:
        return 0
    parts = f"{len(tenant)}:{tenant}{salt}".encode()
    return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little")


def _check_grammar(query: Query, model: ServedModel, policy: Policy) -> None:
    """Finds out at the door what no service could follow; only whether a tokenizer can write it is theirs to say."""
    asked = query.sampling
    if asked.grammar is None:
        return
    if query.grammar_field == TOOL_CHOICE and not writes_calls(model.tokenizer.template):
        raise InvalidArgument(TOOL_CHOICE, "must be none or auto: this model's template writes no calls in <tool_call>")
    if (trouble := problem(asked.grammar)) is not None:
        raise InvalidArgument("tools" if query.grammar_field == TOOL_CHOICE else query.grammar_field, trouble)
    if asked.ignore_eos or asked.min_tokens:
        field = "ignore_eos" if asked.ignore_eos else "min_tokens"
        raise InvalidArgument(
            field, f"cannot be had with {query.grammar_field}: the answer ends where its form is complete"
        )
    if policy.synthetic_acceptance is not None:
        raise InvalidArgument(query.grammar_field, "has no meaning where tokens are accepted at a set rate (synthetic)")


def _prompt_only(query: Query) -> bool:
    if query.sampling.max_tokens != 0:
        return False
    if not query.echo and query.prompt_logprobs is None:
        raise InvalidArgument("max_tokens", "must be at least 1, got 0 (without echo or prompt_logprobs)")
    return True


def _prompt_logprobs(query: Query) -> int | None:
    """An echo shows the prompt's tokens as it shows the answer's."""
    wanted = [query.prompt_logprobs, query.logprobs if query.echo else None]
    return max((number for number in wanted if number is not None), default=None)


def _check_prompt_logprobs(query: Query, prompts: Sequence[Sequence[int]]) -> None:
    number = _prompt_logprobs(query)
    if number is None:
        return
    values = sum(map(len, prompts)) * (number + 1) * query.n
    if values > MOST_PROMPT_LOGPROBS:
        field = "logprobs" if query.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidArgument(
            field,
            f"would make {values} log-probabilities of prompts (tokens x alternatives x n); at most "
            f"{MOST_PROMPT_LOGPROBS} are written in one answer",
        )


def _bad_words(query: Query, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word's ids as it stands at the start of a text and behind a space."""
    words = dict.fromkeys(query.sampling.bad_word_ids)
    for ids in words:
        check_ids("bad_words", ids, model)
    for word in query.bad_words:
        for written in (word, " " + word.lstrip(" ")):
            try:
                encoded = model.tokenizer.encode(written, add_special_tokens=False)
            except UnicodeError:
                raise InvalidArgument("bad_words", "holds half of a surrogate pair, which is no text") from None
            if encoded:
                words[tuple(encoded)] = None
    return tuple(words)


def _params(query: Query, model: ServedModel, bad_words: tuple[tuple[int, ...], ...], *, room: int) -> SamplingParams:
    asked, defaults = query.sampling, model.defaults
    check_ids("logit_bias", (token for token, _ in asked.logit_bias), model)
    check_ids("allowed_token_ids", asked.allowed_token_ids, model)
    check_ids("stop_token_ids", asked.stop_token_ids, model)
    stop_ids = set(asked.stop_token_ids)
    if not asked.ignore_eos:
        stop_ids |= model.eos_ids
    # A stop string that is written like a special token never appears in a text without special tokens.
    stop_ids |= {token for text in query.stop if (token := model.tokenizer.special_id(text)) is not None}
    max_tokens = asked.max_tokens
    if max_tokens is None:
        in_chat = isinstance(query.prompts[0], Conversation)
        max_tokens = (defaults.max_new_tokens or room) if in_chat else COMPLETION_MAX_TOKENS
    elif max_tokens < 0:  # before it is cut to the room, where the message would name another number
        raise InvalidArgument("max_tokens", f"must be at least 1, got {max_tokens}")
    min_tokens = _first(asked.min_tokens, 0)
    if room < min_tokens:
        raise InvalidArgument("min_tokens", f"must be at most {room}, the room behind the prompt, got {min_tokens}")
    return SamplingParams(
        temperature=_first(asked.temperature, defaults.temperature),
        top_k=_first(asked.top_k, defaults.top_k),
        top_p=_first(asked.top_p, defaults.top_p),
        min_p=_first(asked.min_p, defaults.min_p),
        presence_penalty=_first(asked.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_first(asked.frequency_penalty, defaults.frequency_penalty),
        repetition_penalty=_first(asked.repetition_penalty, defaults.repetition_penalty),
        logit_bias=asked.logit_bias,
        allowed_token_ids=asked.allowed_token_ids,
        min_tokens=min_tokens,
        stop_token_ids=tuple(sorted(stop_ids)),
        max_tokens=min(max(max_tokens, 1), room),
        bad_words=bad_words,
        grammar=asked.grammar,
    )


def _num_speculative_tokens(query: Query, model: ServedModel) -> int | None:
    wanted = query.speculation
    number = wanted.num_speculative_tokens
    if number is not None and number > model.max_speculative_tokens:
        raise InvalidArgument(
            "num_speculative_tokens", f"must be from 0 to {model.max_speculative_tokens}, got {number}"
        )
    return 0 if wanted.enabled is False else number


def _first(asked: Number | None, default: Number) -> Number:
    """The asked value, which may be 0, else the default."""
    return default if asked is None else asked
