"""The HTTP application: routes, and nothing that decides anything."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from coordinator.api_keys import Caller
from coordinator.bodies import ChatCompletionRequest, CompletionRequest
from coordinator.fields import Door
from coordinator.front import Front
from coordinator.key_check import KeyCheck
from coordinator.metrics import CONTENT_TYPE
from coordinator.openai import parse
from coordinator.parts import PartInfo
from coordinator.problems import BodyTooLarge, problem
from coordinator.problems import body as error_body
from coordinator.reply import REQUEST_ID_HEADER, Reply, request_id
from outrider import __version__
from outrider.errors import InvalidArgument, OutriderError
from outrider.tracing import TRACEPARENT

TIMEOUT_HEADER = "x-request-timeout"
_SMALLEST_BODY_LIMIT = 1 << 20
_BODY_BYTES_PER_TOKEN = 64
"""Ten times what a token takes as text, and eight times what it takes as a number."""

_LARGE_BODY_BYTES = 1 << 16
"""Parsing more than this takes longer than a turn of the event loop should."""


def build_app(front: Callable[[], Front], exposition: Callable[[], Awaitable[bytes]] | None = None) -> FastAPI:
    """The application.

    Args:
        front: asked for with each request, because it may be made later than the routes.
        exposition: what `/metrics` answers, where that is more than this coordinator's own series.
    """
    app = FastAPI(title="Outrider", version=__version__, docs_url=None, redoc_url=None)

    @app.post("/v1/completions", openapi_extra=_request_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await _answer(front(), request, Door.COMPLETIONS)

    @app.post("/v1/chat/completions", openapi_extra=_request_body(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        return await _answer(front(), request, Door.CHAT)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = front().model
        entry = {"id": model.name, "object": "model", "created": model.created, "owned_by": "outrider"}
        return {"object": "list", "data": [{**entry, "root": model.root, "max_model_len": model.max_model_len}]}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        reason, state = front().readiness
        degraded = [part._asdict() for part in state.degraded]
        content: dict[str, Any] = {"degraded": degraded, "last_step_age_s": state.last_step_age_s}
        content |= {"target": _part(state.target), "draft": _part(state.draft), "max_num_seqs": front().places}
        content["planted_errors"] = [part for part, allows in front().planted_errors.items() if allows]
        if reason:
            content |= error_body(reason, "service_unavailable_error")
        return JSONResponse(content, 503 if reason else 200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        text = front().metrics.render() if exposition is None else await exposition()
        return Response(text, media_type=CONTENT_TYPE)

    @app.exception_handler(OutriderError)
    async def domain_error(_: Request, error: OutriderError) -> JSONResponse:
        answer = problem(error)
        front().metrics.rejected.labels(str(answer.status)).inc()
        return JSONResponse(answer.body, answer.status, answer.headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(error_body(message, "invalid_request_error"), error.status_code, error.headers)

    app.add_middleware(KeyCheck, front=front)
    _describe(app)
    return app


def _part(info: PartInfo | None) -> dict[str, Any] | None:
    """A service as `/ready` shows it."""
    if info is None:
        return None
    return {
        "model": info.model_id,
        "revision": info.model_revision,
        "weight_hash": info.weight_hash,
        "parameters": info.parameters,
        "vocab_rows": info.vocab_rows,
        "device": info.device_name,
        "device_uuid": info.device_uuid,
        "dtype": info.dtype,
        "kind": info.draft_kind or "target",
        "batch_invariant": info.batch_invariant,
        "batch_invariance_note": info.batch_invariance_note,
    }


async def _answer(front: Front, request: Request, door: Door) -> Response:
    body = await _body(request, front)
    timeout_s = _timeout_s(request.headers.get(TIMEOUT_HEADER))
    parsing = partial(parse, body, door, strict_fields=front.config.strict_fields, timeout_s=timeout_s)
    caller: Caller = request.state.caller
    is_large = len(body) > _LARGE_BODY_BYTES
    query, shape = await front.off_loop(caller.name, parsing, timeout_s) if is_large else parsing()
    front.metrics.ignored_fields.inc(len(shape.ignored))
    named = request_id(request.headers.get(REQUEST_ID_HEADER))
    query = replace(
        query,
        request_id=named,
        client=caller.name,
        tenant=caller.tenant,
        traceparent=request.headers.get(TRACEPARENT, ""),
    )
    return Reply(front, query, shape)


async def _body(request: Request, front: Front) -> bytes:
    limit = max(_SMALLEST_BODY_LIMIT, front.model.max_model_len * _BODY_BYTES_PER_TOKEN)
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > limit:
        raise BodyTooLarge(limit)  # before any of it is read
    parts, length = [], 0
    async for part in request.stream():
        length += len(part)
        if length > limit:
            raise BodyTooLarge(limit)
        parts.append(part)
    return b"".join(parts)


def _timeout_s(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidArgument(TIMEOUT_HEADER, f"must be a positive number of seconds, got {text!r}")
    return value


def _request_body(model: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _describe(app: FastAPI) -> None:
    """Completes `/openapi.json`: request bodies are parsed by hand, so FastAPI does not know their models."""
    generated = app.openapi
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (CompletionRequest, "validation"),
        (ChatCompletionRequest, "validation"),
    ]

    def openapi() -> dict[str, Any]:
        document = generated()
        _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
