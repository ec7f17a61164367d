"""The two kinds of link and the calls behind them: all that the coordinator knows of the services' messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import grpc

from coordinator.parts import PartInfo
from coordinator.rows import ProposeRow, VerifyRow, propose_batch, verify_batch
from outrider.errors import Unavailable
from outrider.rpc.codec import proposal_from_pb, propose_to_pb, verdict_from_pb, verify_to_pb
from outrider.rpc.hello import Hello, HelloReply, hello_reply_from_pb, hello_to_pb
from outrider.seam import ProposalBatch, Replies, VerdictBatch
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

_INFO_TIMEOUT_S = 5.0
_TOKENIZER_TIMEOUT_S = 60.0


class ReplyBatch(Protocol):
    """What `ProposalBatch` and `VerdictBatch` have in common."""

    @property
    def replies(self) -> Replies: ...


Row = TypeVar("Row")
Reply = TypeVar("Reply", bound=ReplyBatch)


class LinkKind(NamedTuple, Generic[Row, Reply]):
    """What tells the target's link from the draft's."""

    part: str
    stub: Callable[[grpc.aio.Channel], Any]
    method: str
    request: Callable[..., Any]
    write: Callable[[Sequence[Row], Sequence[int]], Any]
    read: Callable[[Any], Reply]

    def call(self, channel: grpc.aio.Channel) -> Any:
        """The long-lived call."""
        return getattr(self.stub(channel), self.method)()

    async def greet(self, call: Any, hello: Hello) -> HelloReply:
        """
        Raises:
            Unavailable: the service ended the call instead of greeting back.
            InvalidArgument: its greeting makes no sense.
        """
        await call.write(self.request(hello=hello_to_pb(hello)))
        message = await call.read()
        if message is grpc.aio.EOF or not message.HasField("hello"):
            raise Unavailable("it did not greet back")
        return hello_reply_from_pb(message.hello)

    async def describe(self, channel: grpc.aio.Channel) -> PartInfo:
        """What the service says of itself."""
        response = await self.stub(channel).GetInfo(common_pb2.GetInfoRequest(), timeout=_INFO_TIMEOUT_S)
        return PartInfo.from_pb(response.info)

    async def tokenizer_files(self, channel: grpc.aio.Channel) -> dict[str, bytes]:
        """The service's tokenizer, file name -> content; empty where it has none."""
        files: dict[str, bytes] = {}
        request = common_pb2.GetTokenizerRequest()
        try:
            async for piece in self.stub(channel).GetTokenizer(request, timeout=_TOKENIZER_TIMEOUT_S):
                files[piece.file_name] = files.get(piece.file_name, b"") + piece.data
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise
        return files


TARGET: LinkKind[VerifyRow, VerdictBatch] = LinkKind(
    part="target",
    stub=target_pb2_grpc.TargetServiceStub,
    method="Verify",
    request=target_pb2.VerifyRequest,
    write=lambda rows, closed: verify_to_pb(verify_batch(rows, closed)),
    read=verdict_from_pb,
)
DRAFT: LinkKind[ProposeRow, ProposalBatch] = LinkKind(
    part="draft",
    stub=draft_pb2_grpc.DraftServiceStub,
    method="Propose",
    request=draft_pb2.ProposeRequest,
    write=lambda rows, closed: propose_to_pb(propose_batch(rows, closed)),
    read=proposal_from_pb,
)
