"""TLS at both kinds of door: who gets in, who is refused, and what happens when the files change."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.gate import Gate
from outrider.certs.issue import issue
from outrider.errors import InvalidArgument
from outrider.rpc.credentials import PLAIN, TlsFiles, open_channel, server_credentials
from outrider.rpc.exposure import guard
from outrider.rpc.options import TARGET_SERVICE_NAME
from outrider.rpc.server import Server

REFUSED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def files(folder: Path, part: str, *, ca: Path | None = None) -> TlsFiles:
    return TlsFiles(
        certfile=str(folder / f"{part}.pem"), keyfile=str(folder / f"{part}.key"), ca_certs=str(ca or folder / "ca.pem")
    )


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of an authority that nobody here knows."""
    folder = tmp_path_factory.mktemp("foreign")
    issue(folder)
    return folder


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    issue(tmp_path)
    return tmp_path


@asynccontextmanager
async def target(tls: TlsFiles) -> AsyncIterator[int]:
    server = Server(TARGET_SERVICE_NAME, message_limit=1 << 20, credentials=server_credentials(tls))
    port = await server.start("127.0.0.1", 0)
    await server.set_serving(value=True)
    try:
        yield port
    finally:
        await server.stop()


async def ask(port: int, tls: TlsFiles, authority: str | None = "outrider-target") -> bool:
    """Whether a client with these files is answered; a refusal must be one of the transport's."""
    async with open_channel(f"127.0.0.1:{port}", tls, authority) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            assert error.code() in REFUSED, error
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_mutual_target_serves_the_coordinator_and_nobody_else(certs: Path, foreign: Path) -> None:
    """Guards the links: a plain client, a wrong authority on either side, no certificate, and another part's.

    The server answers the right client after every refusal.
    """
    right = files(certs, "coordinator")
    async with target(files(certs, "target")) as port:
        assert await ask(port, right)
        for wrong in (
            PLAIN,
            TlsFiles(ca_certs=right.ca_certs),
            files(certs, "coordinator", ca=foreign / "ca.pem"),
            files(foreign, "coordinator", ca=certs / "ca.pem"),
            files(certs, "draft"),
        ):
            assert not await ask(port, wrong), wrong
            assert await ask(port, right)


async def test_a_certificate_counts_for_the_part_that_it_names(certs: Path) -> None:
    """Guards against a draft that poses as the target. Addresses may differ from names: one is reached by IP here."""
    right = files(certs, "coordinator")
    async with target(files(certs, "draft")) as port:
        assert not await ask(port, right)
        assert await ask(port, right, "outrider-draft")
        assert await ask(port, right, None)


async def test_a_new_certificate_is_taken_up_and_a_half_done_exchange_is_not(certs: Path, foreign: Path) -> None:
    """Guards long-lived services against the day their certificate expires, and against a restart to renew it."""

    async def serial() -> int:
        pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=10)
        return x509.load_pem_x509_certificate(pem.encode()).serial_number

    own = TlsFiles(certfile=str(certs / "target.pem"), keyfile=str(certs / "target.key"))
    async with target(own) as port:
        first = await serial()
        (certs / "target.key").write_bytes((foreign / "target.key").read_bytes())
        assert await serial() == first
        issue(certs)
        assert await serial() != first
        assert await ask(port, TlsFiles(ca_certs=str(certs / "ca.pem")))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda folder: (folder / "target.key").unlink(), "ssl_keyfile.*cannot be read"),
        (lambda folder: (folder / "target.pem").write_text("x"), "no certificate with its key"),
        (
            lambda folder: (folder / "target.key").write_bytes((folder / "draft.key").read_bytes()),
            "KEY_VALUES_MISMATCH",
        ),
    ],
)
def test_files_that_do_not_fit_stop_the_start(certs: Path, change: object, wanted: str) -> None:
    """Guards against a server that starts and refuses every client."""
    change(certs)  # type: ignore[operator]
    with pytest.raises(InvalidArgument, match=wanted):
        server_credentials(files(certs, "target"))


def test_issuing_again_keeps_the_authority_and_hides_the_keys(certs: Path) -> None:
    """Guards peers that trust the authority against a renewal of the parts' certificates."""
    before = (certs / "ca.pem").read_bytes()
    parts = (certs / "target.pem").read_bytes()
    issue(certs, hosts=("api.example", "192.0.2.7"))
    assert (certs / "ca.pem").read_bytes() == before
    assert (certs / "target.pem").read_bytes() != parts
    assert {path.stat().st_mode & 0o777 for path in certs.glob("*.key")} == {0o600}
    names = x509.load_pem_x509_certificate((certs / "coordinator.pem").read_bytes()).extensions
    listed = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "api.example" in listed.get_values_for_type(x509.DNSName)
    assert "192.0.2.7" in map(str, listed.get_values_for_type(x509.IPAddress))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "target", "127.0.0.1.example"])
def test_plain_text_off_loopback_needs_a_word(host: str) -> None:
    """Guards prompts on a network against a forgotten flag."""
    with pytest.raises(InvalidArgument, match=r"host: .* is not loopback.*insecure"):
        guard("host", host, encrypted=False, insecure=False, remedy="x")
    guard("host", host, encrypted=True, insecure=False, remedy="x")
    guard("host", host, encrypted=False, insecure=True, remedy="x")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    guard("host", host, encrypted=False, insecure=False, remedy="x")


# ---- the gate before the HTTP door ----


class Inner:
    """A plain door that answers each connection's first bytes and counts those that are open."""

    def __init__(self) -> None:
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while data := await reader.read(100):
                writer.write(b"you said " + data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def gated(tls: TlsFiles, most: int = 10) -> AsyncIterator[tuple[Inner, int]]:
    inner = Inner()
    door = await asyncio.start_server(inner.serve, "127.0.0.1", 0)
    gate = Gate(tls, ("127.0.0.1", door.sockets[0].getsockname()[1]), most)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    gate.start(listening)
    try:
        yield inner, port
    finally:
        await gate.close()
        door.close()


async def say(port: int, tls: TlsFiles | None, keep: list[asyncio.StreamWriter] | None = None) -> bytes:
    """What comes back; empty where the connection is refused or ended."""
    context = None
    if tls is not None:
        context = ssl.create_default_context(cafile=tls.ca_certs)
        if tls.certfile is not None:
            context.load_cert_chain(tls.certfile, tls.keyfile)
    try:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(b"hello")
            answer = await reader.read(100)
    except (OSError, ssl.SSLError):
        return b""
    if keep is None:
        writer.close()
    else:
        keep.append(writer)
    return answer


async def test_the_gate_lets_in_whom_it_should(certs: Path, foreign: Path) -> None:
    """Guards the HTTP door like the links, and that a refusal leaves it open to others."""
    right = files(certs, "coordinator")
    async with gated(right) as (inner, port):
        assert await say(port, right) == b"you said hello"
        for wrong in (None, TlsFiles(ca_certs=right.ca_certs), files(foreign, "coordinator", ca=certs / "ca.pem")):
            assert not (await say(port, wrong)).startswith(b"you said")
            assert await say(port, right) == b"you said hello"
        async with asyncio.timeout(10):
            while inner.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_the_gate_takes_up_new_files(certs: Path, foreign: Path) -> None:
    """Guards both the certificate and the clients' authority, which a loaded context would keep for ever."""
    async with gated(files(certs, "coordinator")) as (_, port):
        assert await say(port, files(certs, "coordinator"))
        stranger = files(foreign, "coordinator", ca=certs / "ca.pem")
        assert not await say(port, stranger)
        for name in ("ca.pem", "coordinator.key", "coordinator.pem"):
            (certs / name).write_bytes((foreign / name).read_bytes())
        assert await say(port, files(foreign, "coordinator")) == b"you said hello"


async def test_the_gate_closes_what_is_beyond_its_limit(certs: Path) -> None:
    """Guards file descriptors against clients that open connections without end."""
    right, keep = files(certs, "coordinator"), list[asyncio.StreamWriter]()
    async with gated(right, most=3) as (_, port):
        for _ in range(3):
            assert await say(port, right, keep) == b"you said hello"
        assert await say(port, right) == b""
        keep.pop().close()
        async with asyncio.timeout(10):
            while not await say(port, right):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    for writer in keep:
        writer.close()


async def test_the_gate_passes_on_last_words(certs: Path) -> None:
    """Guards the end of an answer that is still on its way to a slow client when a drain has closed the door behind."""
    right, length, begun = files(certs, "coordinator"), 4 << 20, asyncio.Event()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        begun.set()
        writer.write(bytes(length))
        writer.close()

    door = await asyncio.start_server(speak, "127.0.0.1", 0)
    gate = Gate(right, ("127.0.0.1", door.sockets[0].getsockname()[1]))
    listening = socket.create_server(("127.0.0.1", 0))
    gate.start(listening)
    context = ssl.create_default_context(cafile=right.ca_certs)
    context.load_cert_chain(right.certfile or "", right.keyfile)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # so that the gate cannot be rid of it at once
    slow.connect(listening.getsockname())
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(
            sock=slow, ssl=context, server_hostname="127.0.0.1", limit=1 << 10
        )
        writer.write(b"hello")
        await begun.wait()
        closing = asyncio.create_task(gate.close(20))
        assert len(await reader.read()) == length
        writer.close()
        await closing
    door.close()
