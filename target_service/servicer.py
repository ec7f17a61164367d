"""The gRPC face of the target service: three methods, no logic."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from outrider.rpc import codec
from outrider.rpc.link import LinkHost, LinkKind
from outrider.rpc.options import credit
from outrider.rpc.server import Server
from outrider.seam import Replies, VerdictBatch, VerifyBatch
from outrider.service.servicer import ServicerBase
from outrider.v1 import target_pb2, target_pb2_grpc

if TYPE_CHECKING:
    from target_service.backend import Backend


class TargetServicer(ServicerBase, target_pb2_grpc.TargetServiceServicer):
    """Answers UNAVAILABLE until the backend is ready."""

    def __init__(
        self, backend: Backend, *, instance_id: str, max_num_seqs: int, max_slots: int, lease_s: float
    ) -> None:
        super().__init__(backend, instance_id)
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

    async def Verify(self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        self._check_ready()
        await self.links.serve(request_iterator, context)


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
