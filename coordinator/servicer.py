"""The gRPC door: protobuf in and out, the same queries and the same answers as over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc

from coordinator.answer import Answer, Piece
from coordinator.front import Front
from coordinator.problems import problem
from coordinator.query import Conversation, Query, Sampling, Speculation
from outrider.errors import InvalidArgument, OutriderError
from outrider.sampling import Rule
from outrider.v1 import common_pb2, coordinator_pb2, coordinator_pb2_grpc

_FINISH = {
    "stop": coordinator_pb2.FINISH_REASON_STOP,
    "length": coordinator_pb2.FINISH_REASON_LENGTH,
}
_METHODS = {
    common_pb2.ACCEPTANCE_RULE_UNSPECIFIED: None,
    common_pb2.ACCEPTANCE_RULE_STANDARD: "standard",
    common_pb2.ACCEPTANCE_RULE_COUPLED: "coupled",
}
_RULES = {
    Rule.STANDARD: common_pb2.ACCEPTANCE_RULE_STANDARD,
    Rule.COUPLED: common_pb2.ACCEPTANCE_RULE_COUPLED,
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


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Generate. Errors leave through `outrider.rpc`'s interceptor, which gives them their status."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Generate(
        self, request: coordinator_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[coordinator_pb2.GenerateResponse]:
        """Streams one answer; when the client goes away, gRPC cancels this and the answer ends with it."""
        try:
            query = query_from_pb(request, context.time_remaining())
            async with self._front.answer(query) as answer:
                async for piece in answer:
                    yield _response(
                        piece, answer, prompt_ids=answer.prompt_ids if request.return_prompt_token_ids else ()
                    )
        except OutriderError as error:
            self._front.metrics.rejected.labels(str(problem(error).status)).inc()
            raise


def query_from_pb(request: coordinator_pb2.GenerateRequest, timeout_s: float | None) -> Query:
    """
    Args:
        timeout_s: seconds until the call's own deadline, or None.

    Raises:
        InvalidArgument: names the field.
    """
    prompt, field = _prompt(request)
    speculation = request.speculation
    if speculation.rule not in _METHODS:
        raise InvalidArgument("rule", f"unknown acceptance rule {speculation.rule}")
    if any(not text for text in request.stop):
        raise InvalidArgument("stop", "holds an empty string")
    return Query(
        model=request.model or None,
        prompt=prompt,
        prompt_field=field,
        sampling=_sampling(request),
        speculation=Speculation(
            enabled=speculation.enabled if speculation.HasField("enabled") else None,
            num_speculative_tokens=(
                speculation.num_speculative_tokens if speculation.HasField("num_speculative_tokens") else None
            ),
            method=_METHODS[speculation.rule],
        ),
        seed=request.seed if request.HasField("seed") else None,
        stop=tuple(request.stop),
        timeout_s=timeout_s,
    )


def _prompt(request: coordinator_pb2.GenerateRequest) -> tuple[str | tuple[int, ...] | Conversation, str]:
    field = request.WhichOneof("prompt")
    if field == "text":
        return request.text, field
    if field == "token_ids":
        return tuple(request.token_ids.ids), field
    if field == "chat":
        if not request.chat.messages:
            raise InvalidArgument(field, "is empty")
        messages = tuple({"role": turn.role, "content": turn.content} for turn in request.chat.messages)
        return Conversation(messages=messages), field
    raise InvalidArgument("prompt", "is required: one of text, token_ids, chat")


def _sampling(request: coordinator_pb2.GenerateRequest) -> Sampling:
    params = request.params
    given = {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    return Sampling(
        **given,
        min_tokens=params.min_tokens,
        logit_bias=tuple((bias.token_id, bias.bias) for bias in params.logit_bias),
        allowed_token_ids=tuple(params.allowed_token_ids),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=request.ignore_eos,
    )


def _response(piece: Piece, answer: Answer, *, prompt_ids: Sequence[int]) -> coordinator_pb2.GenerateResponse:
    response = coordinator_pb2.GenerateResponse(
        text=piece.text, token_ids=piece.token_ids, drafted=piece.drafted, text_ends=piece.text_ends
    )
    if piece.finish_reason is not None:
        usage, stats = answer.usage, answer.speculation
        response.finish_reason = _FINISH[piece.finish_reason]
        response.prompt_tokens = usage.prompt_tokens
        response.completion_tokens = usage.completion_tokens
        response.prompt_token_ids.extend(prompt_ids)
        response.metrics.CopyFrom(
            coordinator_pb2.SpeculationMetrics(
                num_spec_steps=stats.num_spec_steps,
                num_draft_tokens=stats.num_draft_tokens,
                num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
                acceptance_histogram=stats.acceptance_histogram,
                rule=_RULES[stats.rule],
            )
        )
    return response
