"""The gRPC face of the draft service: three methods, no logic."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Protocol

import grpc
import numpy as np

from draft_service.intake import Message
from draft_service.job import to_batch
from outrider.rpc import codec
from outrider.rpc.link import LinkHost, LinkKind
from outrider.rpc.options import LEASE_S, credit
from outrider.rpc.server import Server
from outrider.seam import ProposalBatch, ProposeBatch, Replies, Timings
from outrider.service import servicer
from outrider.v1 import draft_pb2, draft_pb2_grpc


class Backend(servicer.Backend, Protocol):
    """What drafts, in a thread of its own."""

    def submit(self, message: Message) -> None: ...


class DraftServicer(servicer.ServicerBase, draft_pb2_grpc.DraftServiceServicer):
    """Answers UNAVAILABLE until the backend is ready."""

    def __init__(
        self, backend: Backend, *, instance_id: str, max_num_seqs: int, max_slots: int, lease_s: float = LEASE_S
    ) -> None:
        super().__init__(backend, instance_id)
        self.links: LinkHost[ProposeBatch, ProposalBatch] = LinkHost(
            LinkKind(codec.propose_from_pb, codec.proposal_to_pb, _refuse, draft_pb2.ProposeResponse),
            backend.submit,
            instance_id=instance_id,
            credit=credit(max_num_seqs),
            max_slots=max_slots,
            lease_s=lease_s,
        )

    def register(self, server: Server) -> None:
        """Makes a server answer this service's methods."""
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server.grpc)

    async def Propose(self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        self._check_ready()
        await self.links.serve(request_iterator, context)


def _refuse(replies: Replies) -> ProposalBatch:
    nothing = to_batch((), Timings()).slots
    return ProposalBatch(replies=replies, slots=replace(nothing, per_item=np.zeros(len(replies), np.uint8)))
