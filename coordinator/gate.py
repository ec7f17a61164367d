"""TLS in front of the HTTP door.

Neither uvicorn nor Serve's proxy reads its certificates again, or bounds the number of connections. So with a
certificate the plain door listens on loopback, and this gate, in the launcher's process, takes the connections, ends
their TLS and hands the bytes on. It understands no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Iterator

from outrider.errors import InvalidArgument, Unavailable
from outrider.rpc.credentials import TlsFiles
from outrider.rpc.options import HANDSHAKE_TIMEOUT_MS, MAX_CONNECTIONS

logger = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S = HANDSHAKE_TIMEOUT_MS / 1_000
_CHUNK = 1 << 16
_STARTED_WITHIN_S = 10.0
_FAREWELL_S = 2.0
"""For last words to slow clients."""


class Gate:
    """Takes connections at one address until it is closed; needs a running event loop."""

    def __init__(self, files: TlsFiles, inner: tuple[str, int], max_connections: int = MAX_CONNECTIONS) -> None:
        """
        Args:
            files: certificate and key, and the clients' authority where they must show a certificate.
            inner: host and port of the plain door behind.
            max_connections: open at once; one beyond them is closed as soon as it is made.

        Raises:
            InvalidArgument: the files cannot be used.
        """
        self._files = files
        self._inner = inner
        self._most = max_connections
        self._open: set[asyncio.Task[None]] = set()
        self._stamp = files.stamp()
        self._current = _context(files)
        self._outer = _context(files)
        self._outer.sni_callback = self._choose  # called for every handshake, whether or not a name is sent
        self._accepting: asyncio.Task[None] | None = None

    def start(self, listening: socket.socket) -> None:
        """Take connections from this socket, which the gate owns from now on."""
        listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(listening))

    async def close(self, farewell_s: float = 0.0) -> None:
        """Take no more connections, and end those there are.

        Args:
            farewell_s: seconds for what the door behind has said before it closed its end of them.
        """
        if self._accepting is not None:
            self._accepting.cancel()
        if self._open and farewell_s:
            await asyncio.wait(self._open, timeout=farewell_s)
        tasks = [*self._open, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                except OSError as error:  # out of file descriptors, or the client is gone already
                    logger.warning("a connection could not be taken: %s", error.strerror)
                    await asyncio.sleep(0.1)
                    continue
                if len(self._open) >= self._most:
                    connection.close()
                    continue
                task = asyncio.create_task(self._serve(connection))
                self._open.add(task)
                task.add_done_callback(self._open.discard)

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        if not await _speaks(loop, connection):  # a buffer for TLS takes 256 KB, so silent ones get none
            connection.close()
            return
        reader = asyncio.StreamReader(_CHUNK)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._outer, ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S
            )
        except (OSError, ssl.SSLError) as error:
            logger.debug("a client was refused: %s", error)
            connection.close()
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        inner: asyncio.StreamWriter | None = None
        try:
            inside, inner = await asyncio.open_connection(*self._inner, limit=_CHUNK)
            pumps = [asyncio.ensure_future(_pump(reader, inner)), asyncio.ensure_future(_pump(inside, writer))]
            # Either side's end is the end: a client that goes away must not leave its answer running.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except OSError as error:
            logger.debug("the door behind the gate: %s", error)
        finally:
            for end in (writer, inner):
                if end is not None:
                    end.close()
            with contextlib.suppress(OSError):  # a TimeoutError is one
                async with asyncio.timeout(_FAREWELL_S):
                    await writer.wait_closed()

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
        """The certificate as it is now; a half-done exchange of the files keeps the old one."""
        try:
            if (stamp := self._files.stamp()) != self._stamp:
                self._current, self._stamp = _context(self._files), stamp
                logger.info("certificate %s read again", self._files.certfile)
        except (OSError, InvalidArgument) as error:
            logger.warning("the new certificate is not usable yet, the old one stays: %s", error)
        connection.context = self._current


@contextlib.contextmanager
def gate(files: TlsFiles, host: str, port: int, inner: tuple[str, int]) -> Iterator[None]:
    """A gate on an event loop and a thread of its own, for as long as the block lasts.

    Raises:
        Unavailable: the address cannot be bound.
        InvalidArgument: the files cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=1_024)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port} ({error.strerror})") from None
    loop = asyncio.new_event_loop()
    made = Gate(files, inner)
    thread = threading.Thread(target=loop.run_forever, name="TLS gate", daemon=True)
    thread.start()

    async def start() -> None:
        made.start(listening)

    asyncio.run_coroutine_threadsafe(start(), loop).result(_STARTED_WITHIN_S)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(made.close(_FAREWELL_S), loop).result(_STARTED_WITHIN_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _speaks(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bool:
    """Whether the client sends anything within the time for the handshake."""
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
            await readable.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(connection)
    return True


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(_CHUNK):
            sink.write(data)
            await sink.drain()


def _context(files: TlsFiles) -> ssl.SSLContext:
    files.check()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    assert files.certfile is not None
    context.load_cert_chain(files.certfile, files.keyfile)
    if files.ca_certs is not None:
        try:
            context.load_verify_locations(files.ca_certs)
        except ssl.SSLError as error:
            raise InvalidArgument("ssl_ca_certs", f"{files.ca_certs} holds no certificate ({error.reason})") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context
