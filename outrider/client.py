"""A small client of the coordinator's gRPC door, for the command line and for examples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from outrider import api_key
from outrider.errors import InvalidArgument, OutriderError, Overloaded, Unauthenticated, Unavailable
from outrider.rpc.credentials import PLAIN, TlsFiles, blocking_channel
from outrider.v1 import common_pb2, coordinator_pb2, coordinator_pb2_grpc

_FINISH = {
    coordinator_pb2.FINISH_REASON_STOP: "stop",
    coordinator_pb2.FINISH_REASON_LENGTH: "length",
}
RULES = {
    "standard": common_pb2.ACCEPTANCE_RULE_STANDARD,
    "coupled": common_pb2.ACCEPTANCE_RULE_COUPLED,
}


class Piece(NamedTuple):
    """What one token contributed.

    Attributes:
        token_id: -1 for text that was held back and became certain without a further token.
        text: possibly empty.
        drafted: whether the draft proposed it.
        logprob: if log-probabilities were asked for.
        tops: most probable ids at its place with their log-probabilities.
    """

    token_id: int
    text: str
    drafted: bool
    logprob: float | None = None
    tops: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Answer:
    """A finished answer.

    Attributes:
        logprobs: parallel to the ids, if they were asked for; `tops` are the most probable ids beside each.
        prompt_logprobs: of the prompt's ids from the second on, if they were asked for.
        metrics: the object of the HTTP API's `metrics.speculative_decoding`.
        seconds: from sending the request to the last response; `first_s` to the first token.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    metrics: dict[str, float | str | list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    first_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens behind the first per second of decoding (the prompt's time is not decoding)."""
        decoding_s = self.seconds - self.first_s
        return (len(self.token_ids) - 1) / decoding_s if decoding_s > 0 and len(self.token_ids) > 1 else 0.0

    @property
    def usage(self) -> dict[str, int]:
        completion = len(self.token_ids)
        total = self.prompt_tokens + completion
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion, "total_tokens": total}


def request(
    prompt: str | list[int],
    *,
    chat: bool = False,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    speculate: bool = True,
    num_speculative_tokens: int | None = None,
    rule: str | None = None,
    return_prompt_token_ids: bool = False,
    n: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    echo: bool = False,
    stop: Sequence[str] = (),
    bad_words: Sequence[str] = (),
) -> coordinator_pb2.GenerateRequest:
    """A GenerateRequest; what is None is left to the server's defaults."""
    message = coordinator_pb2.GenerateRequest(
        return_prompt_token_ids=return_prompt_token_ids,
        n=n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        stop=stop,
        bad_words=bad_words,
    )
    if isinstance(prompt, list):
        message.token_ids.ids.extend(prompt)
    elif chat:
        message.chat.messages.add(role="user", content=prompt)
    else:
        message.text = prompt
    params = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    for name, value in params.items():
        if value is not None:
            setattr(message.params, name, value)
    if seed is not None:
        message.seed = seed
    if not speculate:
        message.speculation.enabled = False
    if num_speculative_tokens is not None:
        message.speculation.num_speculative_tokens = num_speculative_tokens
    if rule is not None:
        message.speculation.rule = RULES[rule]
    return message


class Client:
    """Talks to one coordinator; use as a context manager."""

    def __init__(
        self, address: str, tls: TlsFiles = PLAIN, authority: str | None = None, *, key: str | None = None
    ) -> None:
        """
        Args:
            tls, authority: as in `outrider.rpc.credentials.open_channel`.
            key: API key; None takes the environment's, if there is one.
        """
        self.address = address
        self._channel = blocking_channel(address, tls, authority)
        self._metadata = tuple(api_key.headers(key or api_key.from_environment()).items())
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def generate(self, message: coordinator_pb2.GenerateRequest, answer: Answer) -> Iterator[Piece]:
        """Stream an answer's pieces as they become certain; `answer` is complete when the iterator ends.

        Of a request for several answers the first one is streamed; `complete` returns all.

        Raises:
            InvalidArgument, Overloaded, Unavailable, OutriderError: as the coordinator said.
        """
        began = time.perf_counter()
        try:
            for response in self._stub.Generate(message, metadata=self._metadata):
                now = time.perf_counter() - began
                if response.token_ids and not answer.token_ids:
                    answer.first_s = now
                answer.seconds = now
                if response.choice == 0:
                    yield from self._take(response, answer)
        except grpc.RpcError as error:
            raise _domain_error(error, self.address) from None

    def complete(self, message: coordinator_pb2.GenerateRequest) -> list[Answer]:
        """All answers to a request, by choice, when they are complete.

        Raises:
            InvalidArgument, Overloaded, Unavailable, OutriderError: as the coordinator said.
        """
        answers: dict[int, Answer] = {}
        try:
            for response in self._stub.Generate(message, metadata=self._metadata):
                for _ in self._take(response, answers.setdefault(response.choice, Answer())):
                    pass
        except grpc.RpcError as error:
            raise _domain_error(error, self.address) from None
        return [answers[choice] for choice in sorted(answers)]

    @staticmethod
    def _take(response: coordinator_pb2.GenerateResponse, answer: Answer) -> Iterator[Piece]:
        start = 0
        scores = response.logprobs
        k = len(scores.top_ids) // max(len(scores.logprobs), 1)
        tops = [
            tuple(zip(scores.top_ids[at : at + k], scores.top_logprobs[at : at + k], strict=True))
            for at in range(0, k * len(scores.logprobs), max(k, 1))
        ] or [()] * len(scores.logprobs)
        columns = zip(response.token_ids, response.drafted, response.text_ends, strict=True)
        for index, (token_id, drafted, end) in enumerate(columns):
            scored = (scores.logprobs[index], tops[index]) if scores.logprobs else (None, ())
            yield Piece(token_id, response.text[start:end], drafted, *scored)
            start = end
        answer.logprobs.extend(scores.logprobs)
        answer.tops.extend(tops)
        answer.prompt_logprobs.extend(response.prompt_logprobs.logprobs)
        if start < len(response.text):  # text that was held back and became certain without a further token
            yield Piece(-1, response.text[start:], drafted=False)
        answer.text += response.text
        answer.token_ids.extend(response.token_ids)
        if response.finish_reason:
            answer.finish_reason = _FINISH[response.finish_reason]
            answer.prompt_tokens = response.prompt_tokens
            answer.prompt_token_ids = list(response.prompt_token_ids)
            answer.metrics = speculation_metrics(response.metrics)


def speculation_metrics(metrics: coordinator_pb2.SpeculationMetrics) -> dict[str, float | str | list[int]]:
    """The `metrics.speculative_decoding` object: rates are derived here, raw counts travel."""
    steps, drafted, accepted = metrics.num_spec_steps, metrics.num_draft_tokens, metrics.num_accepted_draft_tokens
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": list(metrics.acceptance_histogram),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "rule": "coupled" if metrics.rule == common_pb2.ACCEPTANCE_RULE_COUPLED else "standard",
    }


def _domain_error(error: grpc.RpcError, address: str) -> OutriderError:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field_name, _, problem = details.partition(": ")
        return InvalidArgument(field_name, problem or details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(details)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return Unauthenticated(f"{address}: {details} (set {api_key.VARIABLE})")
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(f"no answer from {address}: {details}")
    return OutriderError(f"{code.name}: {details}")
