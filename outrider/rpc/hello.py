"""The greeting that opens a link: who speaks, which protocol, and what a service grants."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from outrider.errors import InvalidArgument, Mismatch
from outrider.rpc.columns import U32, read, write
from outrider.rpc.options import PROTOCOL_MAX, PROTOCOL_MIN
from outrider.seam import U32 as U32Column
from outrider.v1 import common_pb2

COORDINATOR_ID_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Coordinator -> service, once per link.

    Attributes:
        coordinator_id: 16 random bytes, the same for as long as the coordinator lives.
        epoch: grows with every reconnect.
        protocol_min, protocol_max: versions spoken, inclusive.
        excluded_ids: [n] u32 ids that a draft's q must never hold.
    """

    coordinator_id: bytes
    epoch: int
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    excluded_ids: U32Column = field(default_factory=lambda: np.empty(0, np.uint32))


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloReply:
    """Service -> coordinator, once per link.

    Attributes:
        instance_id: new at each start of the service; another id means that its streams are gone.
        lease_ms: how long a lost link's streams are kept.
        credit: unanswered items that the service takes; beyond it items are answered RESOURCE_EXHAUSTED.
        protocol_version: the one used on this link.
    """

    instance_id: str
    lease_ms: int
    credit: int
    protocol_version: int


def hello_to_pb(hello: Hello) -> common_pb2.Hello:
    return common_pb2.Hello(
        coordinator_id=hello.coordinator_id,
        link_epoch=hello.epoch,
        protocol=common_pb2.ProtocolRange(min=hello.protocol_min, max=hello.protocol_max),
        excluded_ids=write(hello.excluded_ids, U32),
    )


def hello_from_pb(message: common_pb2.Hello) -> Hello:
    """
    Raises:
        InvalidArgument: naming the field.
    """
    if len(message.coordinator_id) != COORDINATOR_ID_BYTES:
        raise InvalidArgument(
            "coordinator_id", f"must have {COORDINATOR_ID_BYTES} bytes, got {len(message.coordinator_id)}"
        )
    if not 1 <= message.protocol.min <= message.protocol.max:
        raise InvalidArgument("protocol", f"{message.protocol.min} to {message.protocol.max} is no range of versions")
    return Hello(
        coordinator_id=message.coordinator_id,
        epoch=message.link_epoch,
        protocol_min=message.protocol.min,
        protocol_max=message.protocol.max,
        excluded_ids=read("excluded_ids", message.excluded_ids, U32),
    )


def hello_reply_to_pb(reply: HelloReply) -> common_pb2.HelloReply:
    return common_pb2.HelloReply(
        instance_id=reply.instance_id,
        lease_ms=reply.lease_ms,
        credit=reply.credit,
        protocol_version=reply.protocol_version,
    )


def hello_reply_from_pb(message: common_pb2.HelloReply) -> HelloReply:
    """
    Raises:
        InvalidArgument: naming the field.
    """
    if message.credit < 1:
        raise InvalidArgument("credit", "must be at least 1")
    return HelloReply(
        instance_id=message.instance_id,
        lease_ms=message.lease_ms,
        credit=message.credit,
        protocol_version=message.protocol_version,
    )


def negotiate(peer: str, peer_min: int, peer_max: int) -> int:
    """The highest protocol version that both sides speak.

    Args:
        peer: what the other side is, for the message ("coordinator", "draft service").
        peer_min: lowest version that it speaks.
        peer_max: highest version that it speaks.

    Raises:
        Mismatch: there is none; says which side to upgrade.
    """
    version = min(peer_max, PROTOCOL_MAX)
    if version >= max(peer_min, PROTOCOL_MIN):
        return version
    older = f"the {peer}" if peer_max < PROTOCOL_MIN else "this side"
    raise Mismatch(
        f"no common protocol: the {peer} speaks {peer_min} to {peer_max}, this side {PROTOCOL_MIN} to {PROTOCOL_MAX}; "
        f"upgrade {older}"
    )
