"""Server interceptor: a domain error leaves a handler as its status, a bug as INTERNAL, a cancellation as CANCELLED."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.errors import InvalidArgument, OutriderError, Unavailable
from outrider.rpc.errors import abort

logger = logging.getLogger(__name__)

Handler = Callable[[Any, grpc.aio.ServicerContext], Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps what handlers raise. Handlers of this project raise `OutriderError` and never touch codes."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour = getattr(handler, kind)
            if behaviour is not None:
                wrapped = _wrap(method, behaviour)
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                return make(wrapped, _reader(handler.request_deserializer), handler.response_serializer)
        return handler


def _reader(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Bytes that are no message are bad input, with a status that says so; gRPC itself makes INTERNAL of them."""
    if deserializer is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            raise InvalidArgument("message", f"{len(data)} bytes that are no such message ({error})") from None

    return read


def _wrap(method: str, behaviour: Handler) -> Handler:
    if inspect.isasyncgenfunction(behaviour):

        async def generator(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with _mapped(method, context):
                async for response in behaviour(request, context):
                    yield response

        return generator
    if not inspect.iscoroutinefunction(behaviour):
        return behaviour  # the reflection servicer's plain generators

    async def coroutine(request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with _mapped(method, context):
            return await behaviour(request, context)

    return coroutine


@asynccontextmanager
async def _mapped(method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    try:
        yield
    except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
        raise
    except OutriderError as error:
        # Peers ask again and again while a model loads: that is no event.
        level = logging.DEBUG if isinstance(error, Unavailable) else logging.INFO
        logger.log(level, "%s: %s: %s", method, error.status.name, error)
        await abort(context, error)
    except Exception as error:
        logger.exception("%s failed", method)
        await abort(context, OutriderError(f"internal error: {type(error).__name__}; see the service's log"))
