"""Clients that have no business here, at every door, and what becomes of the parts.

    python -m tests.chaos.doors            each wrong client 200 times, 10,000 open connections; memory is watched
    python -m tests.chaos.doors --times 20 --connections 2000

A target with mutual TLS, and a coordinator with mutual TLS on both doors and API keys, with stub models. Plain text at
a TLS port, a foreign authority, no certificate, a wrong key and too large a message must each be refused with the
status or the failed handshake that says why; after each the right client is served. Malformed messages are sent by
`python -m tests.chaos.fuzz`.
"""

from __future__ import annotations

import argparse
import resource
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.certs.issue import issue
from outrider.ports import free_port
from outrider.rpc.files import raise_file_limit
from outrider.rpc.options import HANDSHAKE_TIMEOUT_MS
from outrider.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.e2e.processes import Part, service, started, wait_for

KEY = "the-right-key"
BODY = b'{"prompt": "hi", "max_tokens": 2}'
_SPARE = 1_000
_STARTED_WITHIN_S = 600.0
_FLAT_MB = 20.0
_WITHIN_S = 60.0
_TOO_LARGE = 20 << 20
_HANDSHAKE = (grpc.StatusCode.UNAVAILABLE,)


@dataclass(frozen=True, slots=True)
class Door:
    """One place where clients come in.

    Attributes:
        right: succeeds for a client that may come in, and raises otherwise.
        wrong: by what is wrong with a client, what such a client does; returns how it was refused, or raises.
    """

    name: str
    port: int
    right: Callable[[], object]
    wrong: dict[str, Callable[[], str]]


@dataclass(frozen=True, slots=True)
class Files:
    """Certificates of one authority in a folder."""

    folder: Path

    def flags(self, part: str, prefix: str = "") -> list[str]:
        names = {"certfile": f"{part}.pem", "keyfile": f"{part}.key", "ca-certs": "ca.pem"}
        return [word for flag, name in names.items() for word in (f"--{prefix}ssl-{flag}", str(self.folder / name))]

    def grpc(self, part: str | None, authority: Files | None = None) -> grpc.ChannelCredentials:
        """Trusts `authority` or its own, and shows the certificate of a part, or none."""
        roots = ((authority or self).folder / "ca.pem").read_bytes()
        if part is None:
            return grpc.ssl_channel_credentials(roots)
        pair = [(self.folder / f"{part}.{ending}").read_bytes() for ending in ("key", "pem")]
        return grpc.ssl_channel_credentials(roots, *pair)

    def http(self, part: str | None, authority: Files | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=(authority or self).folder / "ca.pem")
        if part is not None:
            context.load_cert_chain(self.folder / f"{part}.pem", self.folder / f"{part}.key")
        return context


# ---- what clients do ----


def call(port: int, credentials: grpc.ChannelCredentials | None, name: str, work: Callable[[grpc.Channel], Any]) -> Any:
    """Work on a channel of its own."""
    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.ssl_target_name_override", name),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    address = f"127.0.0.1:{port}"
    opened = (
        grpc.insecure_channel(address, options)
        if credentials is None
        else grpc.secure_channel(address, credentials, [*options, ("grpc.ssl_target_name_override", name)])
    )
    with opened as channel:
        return work(channel)


def refused(codes: tuple[grpc.StatusCode, ...], work: Callable[[], object]) -> str:
    """The status by which a call was refused.

    Raises:
        AssertionError: it was not, or by another one.
    """
    try:
        work()
    except grpc.RpcError as error:
        assert error.code() in codes, error
        return str(error.code().name)
    raise AssertionError("it was served")


def healthy(channel: grpc.Channel) -> None:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def generate(channel: grpc.Channel, key: str, prompt: str = "hi") -> None:
    request = coordinator_pb2.GenerateRequest(text=prompt)
    metadata = [("authorization", f"Bearer {key}")] if key else []
    list(coordinator_pb2_grpc.CoordinatorServiceStub(channel).Generate(request, timeout=30, metadata=metadata))


def post(
    url: str, context: ssl.SSLContext | bool, key: str = KEY, content: Any = b'{"prompt": "hi", "max_tokens": 2}'
) -> int:
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    with httpx.Client(verify=context, trust_env=False, timeout=30) as client:
        return client.post(f"{url}/v1/completions", content=content, headers=headers).status_code


def answered(status: int, wanted: int) -> str:
    assert status == wanted, status
    return str(status)


def shut(work: Callable[[], object]) -> str:
    """How a connection failed.

    Raises:
        AssertionError: it did not.
    """
    try:
        status = work()
    except (httpx.TransportError, OSError) as error:
        return type(error).__name__
    raise AssertionError(f"it was served: {status}")


def in_pieces(size: int) -> Iterator[bytes]:
    """A body without a length."""
    for _ in range(size >> 16):
        yield bytes(1 << 16)


# ---- the doors ----


def target_door(port: int, own: Files, foreign: Files) -> Door:
    def ask(credentials: grpc.ChannelCredentials | None, work: Callable[[grpc.Channel], Any] = healthy) -> Any:
        return call(port, credentials, "outrider-target", work)

    return Door(
        "target",
        port,
        lambda: ask(own.grpc("coordinator")),
        {
            "plain text": lambda: refused(_HANDSHAKE, lambda: ask(None)),
            "server of a foreign authority": lambda: refused(_HANDSHAKE, lambda: ask(own.grpc("coordinator", foreign))),
            "client of a foreign authority": lambda: refused(_HANDSHAKE, lambda: ask(foreign.grpc("coordinator", own))),
            "no certificate": lambda: refused(_HANDSHAKE, lambda: ask(own.grpc(None))),
        },
    )


def generate_door(port: int, own: Files, foreign: Files) -> Door:
    def ask(credentials: grpc.ChannelCredentials | None, key: str = KEY, prompt: str = "hi") -> Any:
        return call(port, credentials, "outrider-coordinator", lambda channel: generate(channel, key, prompt))

    right = own.grpc("probe")
    return Door(
        "generate",
        port,
        lambda: ask(right),
        {
            "plain text": lambda: refused(_HANDSHAKE, lambda: ask(None)),
            "server of a foreign authority": lambda: refused(_HANDSHAKE, lambda: ask(own.grpc("probe", foreign))),
            "client of a foreign authority": lambda: refused(_HANDSHAKE, lambda: ask(foreign.grpc("probe", own))),
            "no certificate": lambda: refused(_HANDSHAKE, lambda: ask(own.grpc(None))),
            "wrong key": lambda: refused((grpc.StatusCode.UNAUTHENTICATED,), lambda: ask(right, "wrong")),
            "no key": lambda: refused((grpc.StatusCode.UNAUTHENTICATED,), lambda: ask(right, "")),
            "too large": lambda: refused(
                (grpc.StatusCode.RESOURCE_EXHAUSTED,), lambda: ask(right, prompt="x" * _TOO_LARGE)
            ),
        },
    )


def http_door(port: int, own: Files, foreign: Files) -> Door:
    right, url = own.http("probe"), f"https://127.0.0.1:{port}"
    return Door(
        "http",
        port,
        lambda: answered(post(url, right), 200),
        {
            "plain text": lambda: shut(lambda: post(f"http://127.0.0.1:{port}", True)),
            "server of a foreign authority": lambda: shut(lambda: post(url, own.http("probe", foreign))),
            "client of a foreign authority": lambda: shut(lambda: post(url, foreign.http("probe", own))),
            "no certificate": lambda: shut(lambda: post(url, own.http(None))),
            "wrong key": lambda: answered(post(url, right, "wrong"), 401),
            "no key": lambda: answered(post(url, right, ""), 401),
            "too large": lambda: answered(post(url, right, content=bytes(_TOO_LARGE)), 413),
            "too large, without a length": lambda: answered(post(url, right, content=in_pieces(_TOO_LARGE)), 413),
        },
    )


# ---- the run ----


def memory_mb(part: Part) -> float:
    """Of the part's process and all below it."""
    return sum(process.memory_info().rss for process in part.family) / 1e6


def knock(door: Door, part: Part, times: int) -> list[str]:
    """Lets every wrong client come so many times; returns what was wrong with the door."""
    faults = []
    for what, come in door.wrong.items():
        began, outcomes, half = time.monotonic(), set(), 0.0
        for number in range(times):
            outcomes.add(come())
            if number == times // 2:
                half = memory_mb(part)
        door.right()
        grown = memory_mb(part) - half
        print(
            f"{door.name}: {what}: {times} times refused ({', '.join(sorted(outcomes))}), "
            f"memory {grown:+.1f} MB over the second half, {time.monotonic() - began:.1f} s",
            flush=True,
        )
        if grown > _FLAT_MB:
            faults.append(f"{door.name}: {what}: memory grew by {grown:.0f} MB")
    return faults


def crowd(door: Door, part: Part, connections: int) -> list[str]:
    """Opens so many connections that say nothing and keeps them; the right client must get in while they are there."""
    before, began = memory_mb(part), time.monotonic()
    held = [_connect(door.port) for _ in range(connections)]
    made_s = time.monotonic() - began
    most = memory_mb(part)
    while True:
        try:
            door.right()
            break
        except (grpc.RpcError, httpx.TransportError, OSError) as error:
            if time.monotonic() - began > made_s + HANDSHAKE_TIMEOUT_MS / 1_000 + _WITHIN_S:
                return [f"{door.name}: the right client did not get in beside {connections} connections: {error}"]
            time.sleep(0.5)
    in_s = time.monotonic() - began - made_s
    closed = sum(_is_closed(one) for one in held if one is not None)
    for one in held:
        if one is not None:
            one.close()
    door.right()
    after = memory_mb(part)
    unmade = sum(one is None for one in held)
    print(
        f"{door.name}: {connections} connections within {made_s:.1f} s ({unmade} not made, {closed} closed by the "
        f"door), the right client in after {in_s:.1f} s; memory {before:.0f} MB before, {most:.0f} MB with them, "
        f"{after:.0f} MB after",
        flush=True,
    )
    return [f"{door.name}: memory kept {after - before:.0f} MB of a crowd"] if after - before > 5 * _FLAT_MB else []


def _connect(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=10)
    except OSError:
        return None


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def _coordinator(folder: Path, words: list[str], right: Callable[[int], object]) -> Iterator[tuple[Part, int]]:
    """A coordinator that answers; yields it and the port of its gRPC door."""
    port, grpc_port = free_port(), free_port()
    given = ["--port", str(port), "--grpc-port", str(grpc_port), *words]
    with started("coordinator", given, folder) as (process, log):
        wait_for(lambda: _succeeds(lambda: right(port)), process, log, _STARTED_WITHIN_S)
        yield Part(process, log, folder, port), grpc_port


def _succeeds(work: Callable[[], object]) -> bool:
    try:
        work()
    except (AssertionError, httpx.HTTPError, grpc.RpcError, OSError):
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200, help="that each wrong client comes")
    parser.add_argument("--connections", type=int, default=10_000)
    given = parser.parse_args()
    raise_file_limit()
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and allowed < given.connections + _SPARE:
        print(f"only {allowed} files may be open here: raise `ulimit -n` above {given.connections + _SPARE}")
        return 2
    print(f"ulimit -n: {allowed}")
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as parts:
        folder = Path(name)
        own, foreign = Files(folder / "own"), Files(folder / "foreign")
        for authority in (own, foreign):
            issue(authority.folder)
        keys = folder / "keys"
        keys.write_text(f"client {KEY}\n")
        keys.chmod(0o600)
        target = parts.enter_context(service("target_service", "stub:markov", folder / "target", *own.flags("target")))
        words = ["--target", f"127.0.0.1:{target.port}", "--api-key-file", str(keys)]
        words += own.flags("coordinator") + own.flags("coordinator", "link-")
        right = own.http("probe")
        started_one = _coordinator(
            folder / "coordinator", words, lambda port: answered(post(f"https://127.0.0.1:{port}", right), 200)
        )
        front, grpc_port = parts.enter_context(started_one)
        doors = [
            (target_door(target.port, own, foreign), target),
            (generate_door(grpc_port, own, foreign), front),
            (http_door(front.port, own, foreign), front),
        ]
        for door, part in doors:
            faults += knock(door, part, given.times)
        for door, part in doors:
            faults += crowd(door, part, given.connections)
        for part in (target, front):
            if part.process.poll() is not None:
                faults.append(f"{part.log.name} ended")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
