"""A small client of the coordinator's gRPC door, for the command line and for examples."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from outrider.errors import InvalidArgument, OutriderError, Overloaded, Unavailable
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
    """What one token contributed: its id, its text (possibly empty) and whether the draft proposed it."""

    token_id: int
    text: str
    drafted: bool


@dataclass(slots=True)
class Answer:
    """A finished answer.

    Attributes:
        metrics: the object of the HTTP API's `metrics.speculative_decoding`.
        seconds: from sending the request to the last response; `first_s` to the first token.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
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
) -> coordinator_pb2.GenerateRequest:
    """A GenerateRequest; what is None is left to the server's defaults."""
    message = coordinator_pb2.GenerateRequest(return_prompt_token_ids=return_prompt_token_ids)
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

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),))
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def generate(self, message: coordinator_pb2.GenerateRequest, answer: Answer) -> Iterator[Piece]:
        """Stream an answer's pieces as they become certain; `answer` is complete when the iterator ends.

        Raises:
            InvalidArgument, Overloaded, Unavailable, OutriderError: as the coordinator said.
        """
        began = time.perf_counter()
        try:
            for response in self._stub.Generate(message):
                now = time.perf_counter() - began
                if response.token_ids and not answer.token_ids:
                    answer.first_s = now
                answer.seconds = now
                yield from self._take(response, answer)
        except grpc.RpcError as error:
            raise _domain_error(error, self.address) from None

    @staticmethod
    def _take(response: coordinator_pb2.GenerateResponse, answer: Answer) -> Iterator[Piece]:
        start = 0
        for token_id, drafted, end in zip(response.token_ids, response.drafted, response.text_ends, strict=True):
            yield Piece(token_id, response.text[start:end], drafted)
            start = end
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
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(f"no answer from {address}: {details}")
    return OutriderError(f"{code.name}: {details}")
