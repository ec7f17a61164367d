"""TLS and mutual TLS, from PEM files to what gRPC takes."""

from __future__ import annotations

from pathlib import Path

import grpc

from outrider.errors import InvalidArgument


def server_credentials(
    certfile: str | None, keyfile: str | None, ca_certs: str | None = None
) -> grpc.ServerCredentials | None:
    """Credentials of a server; None where no certificate is given.

    Args:
        certfile: the server's certificate chain.
        keyfile: its private key.
        ca_certs: authority of the clients; with it a client without a certificate is refused.

    Raises:
        InvalidArgument: a file cannot be read.
    """
    if certfile is None or keyfile is None:
        return None
    pair = (_read("ssl_keyfile", keyfile), _read("ssl_certfile", certfile))
    authority = None if ca_certs is None else _read("ssl_ca_certs", ca_certs)
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def channel_credentials(
    ca_certs: str | None, certfile: str | None = None, keyfile: str | None = None
) -> grpc.ChannelCredentials | None:
    """Credentials of a client; None where no authority is given.

    Args:
        ca_certs: authority of the server.
        certfile, keyfile: the client's own, for mutual TLS.

    Raises:
        InvalidArgument: a file cannot be read.
    """
    if ca_certs is None:
        return None
    own = [None if path is None else _read("ssl_certfile", path) for path in (keyfile, certfile)]
    return grpc.ssl_channel_credentials(_read("ssl_ca_certs", ca_certs), *own)


def _read(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(field, f"{path} cannot be read ({error.strerror})") from None
