"""Asks one part whether it serves: `outrider health ADDRESS`, or `python -m outrider.health` where start-up counts.

HOST:PORT is asked by `grpc.health.v1`, an http(s) URL (the coordinator's /ready) by GET. Used as the health check of
containers, so it imports no more than the question needs.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NamedTuple

from outrider.errors import InvalidArgument

if TYPE_CHECKING:  # httpx and gRPC are imported by whoever needs them
    from outrider.rpc.credentials import TlsFiles

TIMEOUT_S = 5.0


class Health(NamedTuple):
    """What a part said: whether it serves, and one line for people."""

    serving: bool
    line: str


def ask(
    address: str, timeout_s: float = TIMEOUT_S, tls: TlsFiles | None = None, authority: str | None = None
) -> Health:
    """Asks the part at HOST:PORT or at an http(s) URL; a part that cannot be reached does not serve.

    Args:
        tls: files of this client, for a gRPC server with TLS or an https URL.
        authority: name in the server's certificate where it is not the host's (gRPC only).

    Raises:
        InvalidArgument: the files cannot be used.
    """
    if address.startswith(("http://", "https://")):
        return _ask_http(address, timeout_s, tls)
    return _ask_grpc(address, timeout_s, tls, authority)


def _ask_grpc(address: str, timeout_s: float, tls: TlsFiles | None, authority: str | None) -> Health:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from outrider.rpc.credentials import PLAIN, blocking_channel

    with blocking_channel(address, tls or PLAIN, authority) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return Health(False, f"{address}: {error.code().name}: {error.details()}")
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return Health(state == "SERVING", f"{address}: {state}")


def _ask_http(url: str, timeout_s: float, tls: TlsFiles | None) -> Health:
    import httpx

    try:
        answer = httpx.get(url, timeout=timeout_s, trust_env=False, verify=tls.client_context() if tls else True)
    except httpx.HTTPError as error:
        return Health(False, f"{url}: {error}")
    return Health(answer.status_code == 200, f"{url}: {answer.status_code} {answer.text}")


def main() -> int:
    """Exit code 0 where the part serves, 1 where it does not, 2 for a question that cannot be asked."""
    parser = argparse.ArgumentParser(prog="python -m outrider.health", description="Ask one part whether it serves.")
    parser.add_argument("address", help="HOST:PORT of a gRPC server, or the URL of a coordinator's /ready")
    parser.add_argument("--ssl-ca-certs", help="PEM file with the server's authority: TLS")
    parser.add_argument("--ssl-certfile", help="PEM file with the certificate to show")
    parser.add_argument("--ssl-keyfile", help="PEM file with its key")
    parser.add_argument("--authority", help="name in the server's certificate, such as outrider-target")
    given = parser.parse_args()
    tls = None
    try:
        if given.ssl_ca_certs or given.ssl_certfile or given.ssl_keyfile:
            from outrider.rpc.credentials import TlsFiles

            tls = TlsFiles(certfile=given.ssl_certfile, keyfile=given.ssl_keyfile, ca_certs=given.ssl_ca_certs)
        health = ask(given.address, tls=tls, authority=given.authority)
    except InvalidArgument as error:
        parser.error(str(error))
    sys.stdout.write(health.line + "\n")
    return 0 if health.serving else 1


if __name__ == "__main__":
    sys.exit(main())
