"""The gRPC door: protobuf in and out, the same queries and the same answers as over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import grpc

from coordinator.answer import Answer, Piece
from coordinator.front import Front
from coordinator.generate_request import query_from_pb
from coordinator.problems import problem
from outrider.logprobs import LogprobRows
from outrider.sampling import Rule
from outrider.tracing import TRACEPARENT
from outrider.v1 import common_pb2, coordinator_pb2, coordinator_pb2_grpc

_FINISH = {
    "stop": coordinator_pb2.FINISH_REASON_STOP,
    "length": coordinator_pb2.FINISH_REASON_LENGTH,
}
_RULES = {
    Rule.STANDARD: common_pb2.ACCEPTANCE_RULE_STANDARD,
    Rule.COUPLED: common_pb2.ACCEPTANCE_RULE_COUPLED,
}


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Generate. Errors leave through `outrider.rpc`'s interceptor, which gives them their status."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Generate(
        self, request: coordinator_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[coordinator_pb2.GenerateResponse]:
        """Streams one answer; when the client goes away, gRPC cancels this and the answer ends with it."""
        begun: set[int] = set()
        try:
            caller = self._front.keyring.caller(_metadata(context, "authorization"))
            query = query_from_pb(request, context.time_remaining())
            traceparent = _metadata(context, TRACEPARENT)
            query = replace(query, client=caller.name, tenant=caller.tenant, traceparent=traceparent)
            async with self._front.answer(query) as answer:
                async for piece in answer:
                    prompt_ids = answer.prompt_ids(piece.choice) if request.return_prompt_token_ids else ()
                    echo = answer.echo(piece.choice) if piece.choice not in begun else None
                    begun.add(piece.choice)
                    said = "" if echo is None else echo.text
                    width = request.prompt_logprobs if request.HasField("prompt_logprobs") else None
                    yield _response(piece, answer, prompt_ids=prompt_ids, echo=said, prompt_width=width)
        except Exception as error:
            if not begun:  # what ends later is no refusal
                self._front.metrics.rejected.labels(str(problem(error).status)).inc()
            raise


def _metadata(context: grpc.aio.ServicerContext, name: str) -> str:
    """What a call says under a name, or empty."""
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get(name, ""))


def _response(
    piece: Piece, answer: Answer, *, prompt_ids: Sequence[int], echo: str, prompt_width: int | None
) -> coordinator_pb2.GenerateResponse:
    prompt_logprobs = piece.prompt_logprobs
    if prompt_logprobs is not None and prompt_width is not None:  # an echo may have needed more
        prompt_logprobs = prompt_logprobs.first(prompt_width)
    response = coordinator_pb2.GenerateResponse(
        choice=piece.choice,
        text=echo + piece.text,
        token_ids=piece.token_ids,
        drafted=piece.drafted,
        text_ends=[len(echo) + end for end in piece.text_ends],
        logprobs=_logprobs(piece.logprobs),
        prompt_logprobs=_logprobs(prompt_logprobs),
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


def _logprobs(rows: LogprobRows | None) -> coordinator_pb2.TokenLogprobs | None:
    if rows is None:
        return None
    return coordinator_pb2.TokenLogprobs(
        logprobs=rows.own.tolist(), top_ids=rows.top_ids.ravel().tolist(), top_logprobs=rows.top.ravel().tolist()
    )
