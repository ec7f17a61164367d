"""ServiceChannel: a gRPC channel to wherever a service is now, with the certificates as they are now."""

from __future__ import annotations

import asyncio

import grpc

from coordinator.config import Resolve
from outrider.errors import InvalidArgument, Unavailable
from outrider.rpc.credentials import Stamp, TlsFiles, open_channel

_RESOLVE_TIMEOUT_S = 5.0


class ServiceChannel:
    """Opened when it is asked for, and anew where the old one would not lead to the service any more.

    Args:
        address: HOST:PORT, or with `resolve` a name that is looked up each time.
        authority: the name in the service's certificate.
    """

    def __init__(self, address: str, tls: TlsFiles, authority: str, resolve: Resolve | None) -> None:
        self._address = self._reached = address
        self._tls = tls
        self._authority = authority
        self._resolve = resolve
        self._stamp: Stamp = ()
        self._channel: grpc.aio.Channel | None = None

    @property
    def present(self) -> grpc.aio.Channel | None:
        """The channel, if one is open."""
        return self._channel

    def start(self) -> None:
        """Opens the channel to an address that needs no looking up."""
        if self._resolve is None:
            self._channel = self._open()

    async def find(self) -> grpc.aio.Channel:
        """A channel that leads to the service.

        Raises:
            Unavailable: it is nowhere, or has not been found yet.
        """
        if self._resolve is not None:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                address = await self._resolve(self._address)
            if address != self._reached:
                await self.drop()
            self._reached = address
        try:
            if self._channel is not None and self._tls.stamp() != self._stamp:
                await self.drop()
            if self._channel is None:
                self._channel = self._open()
        except (OSError, InvalidArgument) as error:
            raise Unavailable(f"the files of its TLS cannot be used: {error}") from None
        return self._channel

    async def drop(self) -> None:
        """Closes the channel; the next `find` opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _open(self) -> grpc.aio.Channel:
        self._stamp = self._tls.stamp()
        return open_channel(self._reached, self._tls, self._authority)
