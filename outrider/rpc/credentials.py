"""TLS and mutual TLS, from PEM files to what gRPC takes; the files are read again when they change."""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from outrider.errors import InvalidArgument, PermissionDenied
from outrider.rpc.options import Options, channel_options

logger = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files; each end of a connection has its own.

    Attributes:
        certfile: own certificate chain. A server needs it; a client shows it where the server asks.
        keyfile: its private key.
        ca_certs: authority of the peer: a client's server, or a server's clients, who must then show a certificate.
    """

    certfile: str | None = None
    keyfile: str | None = None
    ca_certs: str | None = None

    def __post_init__(self) -> None:
        if (self.certfile is None) != (self.keyfile is None):
            missing = "ssl_keyfile" if self.keyfile is None else "ssl_certfile"
            raise InvalidArgument(missing, "certificate and key go together")

    def __bool__(self) -> bool:
        return self.certfile is not None or self.ca_certs is not None

    def check(self) -> None:
        """
        Raises:
            InvalidArgument: a file cannot be read, or certificate and key do not belong together.
        """
        self.read()
        if self.certfile is None or self.keyfile is None:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile, _no_password)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise InvalidArgument(
                "ssl_keyfile", f"{self.keyfile} and {self.certfile} are no certificate with its key ({reason})"
            ) from None

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Certificate, key, authority.

        Raises:
            InvalidArgument: a file cannot be read.
        """
        return (
            _read("ssl_certfile", self.certfile),
            _read("ssl_keyfile", self.keyfile),
            _read("ssl_ca_certs", self.ca_certs),
        )

    def client_context(self) -> ssl.SSLContext:
        """For an HTTP client; without `ca_certs` the server must be known to the system's authorities.

        Raises:
            InvalidArgument: as `check`.
        """
        self.check()
        context = ssl.create_default_context(cafile=self.ca_certs)
        if self.certfile is not None:
            context.load_cert_chain(self.certfile, self.keyfile)
        return context

    def stamp(self) -> Stamp:
        """Changes whenever one of the files does.

        Raises:
            OSError: a file is not there.
        """
        found = [os.stat(path) for path in (self.certfile, self.keyfile, self.ca_certs) if path is not None]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in found)


PLAIN = TlsFiles()
"""No files: plain text."""


class _Watched:
    """The files of a server, asked about at each new connection."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = files.stamp()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        certificate, key, authority = self._files.read()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration if the files changed and fit; a half-done exchange keeps the old one."""
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return None
            self._files.check()
            changed = self.configuration()
        except (OSError, InvalidArgument) as error:
            logger.warning("the new certificate is not usable yet, the old one stays: %s", error)
            return None
        self._stamp = stamp
        logger.info("certificate %s read again", self._files.certfile)
        return changed


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials | None:
    """Credentials of a server; None where no certificate is given.

    With `ca_certs` a client without a certificate of that authority is refused.

    Raises:
        InvalidArgument: a file cannot be read, or the files do not belong together.
    """
    if files.certfile is None:
        if files.ca_certs is not None:
            raise InvalidArgument("ssl_ca_certs", "needs ssl_certfile and ssl_keyfile")
        return None
    files.check()
    watched = _Watched(files)
    return grpc.dynamic_ssl_server_credentials(
        watched.configuration(), watched.fetch, require_client_authentication=files.ca_certs is not None
    )


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of a client, from the files as they are now.

    Without `ca_certs` the server must be known to the system's authorities.

    Raises:
        InvalidArgument: a file cannot be read, or the files do not belong together.
    """
    files.check()
    certificate, key, authority = files.read()
    return grpc.ssl_channel_credentials(authority, key, certificate)


def open_channel(address: str, files: TlsFiles, authority: str | None = None) -> grpc.aio.Channel:
    """A channel, in plain text where no file is given.

    Args:
        address: HOST:PORT.
        files: of this client.
        authority: name that the server's certificate must hold; unset means the host of `address`.

    Raises:
        InvalidArgument: as `channel_credentials`.
    """
    if not files:
        return grpc.aio.insecure_channel(address, channel_options())
    return grpc.aio.secure_channel(address, channel_credentials(files), channel_options() + named(authority))


def blocking_channel(address: str, files: TlsFiles, authority: str | None = None) -> grpc.Channel:
    """As `open_channel`, for programs without an event loop."""
    if not files:
        return grpc.insecure_channel(address, channel_options())
    return grpc.secure_channel(address, channel_credentials(files), channel_options() + named(authority))


def own_door(certfile: str, keyfile: str) -> ssl.SSLContext:
    """For a client of a server that this user runs: it trusts exactly the server's own certificate, and shows it."""
    context = ssl.create_default_context(cafile=certfile)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    context.load_cert_chain(certfile, keyfile)
    return context


def named(authority: str | None) -> Options:
    """Options of a channel whose server shows a certificate of this name, whatever its address."""
    return [] if authority is None else [("grpc.ssl_target_name_override", authority)]


def check_client(context: grpc.aio.ServicerContext, name: str) -> None:
    """Whether a client that showed a certificate is the one of this name; without mutual TLS there is none to check.

    Raises:
        PermissionDenied: its certificate names somebody else.
    """
    names = context.auth_context().get("x509_subject_alternative_name")
    if names is not None and name.encode() not in names:
        shown = ", ".join(one.decode("utf-8", "replace") for one in names)
        raise PermissionDenied(f"only {name} may open a link; this certificate is of {shown}")


def _read(field: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(field, f"{path} cannot be read ({error.strerror})") from None


def _no_password() -> str:
    raise ValueError("an encrypted key; decrypt it, and let file permissions guard it")
