"""Draft and target as processes of their own, for the benchmarks that drive them with a coordinator's `Decoder`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.local.supervisor import PartSpec, Supervisor
from outrider.ports import free_port

READY_WITHIN_S = 600.0


@contextmanager
def services(flags: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Starts services and stops them; yields the address of each role.

    Args:
        flags: of `python -m ROLE_service`, by role (`draft`, `target`); the port is chosen here.
    """
    specs, addresses = [], {}
    for role, arguments in flags.items():
        port = free_port()
        addresses[role] = f"127.0.0.1:{port}"
        specs.append(
            PartSpec(
                role=role,
                module=f"{role}_service",
                arguments=(*arguments, "--port", str(port)),
                ready=partial(_serves, addresses[role]),
            )
        )
    with tempfile.TemporaryDirectory() as logs:
        supervisor = Supervisor(specs, Path(logs), lambda line: print(line, file=sys.stderr))
        try:
            supervisor.wait_ready(READY_WITHIN_S)
            yield addresses
        finally:
            supervisor.stop(5)


def _serves(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=0.5)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
