"""The gRPC face of the target service: three methods, no logic."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from outrider.errors import Unavailable
from outrider.rpc import codec
from outrider.rpc.link import LinkHost, LinkKind
from outrider.rpc.options import credit
from outrider.rpc.server import Server
from outrider.seam import Replies, VerdictBatch, VerifyBatch
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc

if TYPE_CHECKING:
    from target_service.backend import Backend


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Answers UNAVAILABLE until the backend is ready."""

    def __init__(
        self, backend: Backend, *, instance_id: str, max_num_seqs: int, max_slots: int, lease_s: float
    ) -> None:
        self._backend = backend
        self._instance_id = instance_id
        self.links: LinkHost[VerifyBatch, VerdictBatch] = LinkHost(
            LinkKind(codec.verify_from_pb, codec.verdict_to_pb, _refuse, target_pb2.VerifyResponse),
            backend.submit,
            instance_id=instance_id,
            credit=credit(max_num_seqs),
            max_slots=max_slots,
            lease_s=lease_s,
        )

    def register(self, server: Server) -> None:
        """Makes a server answer this service's methods."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server.grpc)

    async def GetInfo(
        self, request: common_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.GetInfoResponse:
        self._check_ready()
        return common_pb2.GetInfoResponse(info=self._backend.info(self._instance_id))

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common_pb2.GetTokenizerResponse]:
        self._check_ready()
        async for piece in self._backend.tokenizer():
            yield piece

    async def Verify(self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        self._check_ready()
        await self.links.serve(request_iterator, context)

    def _check_ready(self) -> None:
        if not self._backend.ready.done():
            raise Unavailable("the model is loading")


def _refuse(replies: Replies) -> VerdictBatch:
    n = len(replies)
    return VerdictBatch(
        replies=replies,
        slots_done=np.zeros(n, np.uint8),
        cuts=np.zeros(n, np.uint8),
        p=np.empty(0, np.float32),
        emit=np.empty(0, np.uint32),
        bonus=np.zeros(n, np.uint32),
        dense_p=np.empty(0, np.float32),
    )
