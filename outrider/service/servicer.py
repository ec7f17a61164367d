"""What the gRPC faces of both services have in common: what they are, and their tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from outrider.errors import Unavailable
from outrider.service import service
from outrider.v1 import common_pb2


class Backend(service.Backend, Protocol):
    """What a servicer answers from."""

    def info(self, instance_id: str) -> common_pb2.ServiceInfo:
        """For GetInfo; only when ready."""

    def tokenizer(self) -> AsyncIterator[common_pb2.GetTokenizerResponse]:
        """For GetTokenizer."""


class ServicerBase:
    """Answers UNAVAILABLE until the backend is ready."""

    def __init__(self, backend: Backend, instance_id: str) -> None:
        self._told_by = backend
        self._instance_id = instance_id

    async def GetInfo(
        self, request: common_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.GetInfoResponse:
        self._check_ready()
        return common_pb2.GetInfoResponse(info=self._told_by.info(self._instance_id))

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common_pb2.GetTokenizerResponse]:
        self._check_ready()
        async for piece in self._told_by.tokenizer():
            yield piece

    def _check_ready(self) -> None:
        if not self._told_by.ready.done():
            raise Unavailable("the model is loading")
