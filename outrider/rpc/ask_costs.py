"""Asks a service what its steps cost."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc

from outrider.costs import CostProfile
from outrider.errors import Unavailable
from outrider.rpc.cost_codec import costs_from_pb
from outrider.rpc.credentials import PLAIN, TlsFiles, blocking_channel
from outrider.v1 import common_pb2, draft_pb2_grpc, target_pb2_grpc

_TIMEOUT_S = 5.0
_STUBS: dict[str, Any] = {"target": target_pb2_grpc.TargetServiceStub, "draft": draft_pb2_grpc.DraftServiceStub}


class ServiceCosts(NamedTuple):
    """What a service measured of itself.

    Attributes:
        state: "cached", "measured", "measuring", "off"; empty for a draft without a model.
        profile: None where `state` says that there is none.
    """

    role: str
    model: str
    device: str
    state: str
    profile: CostProfile | None


def ask_costs(role: str, address: str, tls: TlsFiles = PLAIN, authority: str | None = None) -> ServiceCosts:
    """
    Args:
        role: "target" or "draft".
        address: HOST:PORT of its gRPC service.
        tls, authority: as in `outrider.rpc.credentials.open_channel`.

    Raises:
        Unavailable: it does not answer.
    """
    with blocking_channel(address, tls, authority) as channel:
        try:
            info = _STUBS[role](channel).GetInfo(common_pb2.GetInfoRequest(), timeout=_TIMEOUT_S).info
        except grpc.RpcError as error:
            raise Unavailable(f"the {role} service at {address} does not answer: {error.details()}") from None
    return ServiceCosts(role, info.model_id, info.device_name, info.costs.state, costs_from_pb(info.costs))
