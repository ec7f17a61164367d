"""What the doors need of a decoder, so that they can be tested against a scripted one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from coordinator.costs import Costs
from coordinator.counters import Counters
from coordinator.parts import DecoderState
from coordinator.request import DecodingRequest, Emission, StreamStats


class BackendStream(Protocol):
    """One answer being decoded."""

    @property
    def stats(self) -> StreamStats:
        """What speculation did so far."""

    def __aiter__(self) -> AsyncIterator[Emission]: ...

    async def aclose(self) -> None:
        """End it wherever it is, and free both sides."""


class Backend(Protocol):
    """`coordinator.decoder.Decoder`, or a stand-in."""

    @property
    def state(self) -> DecoderState:
        """What it is attached to now."""

    @property
    def counters(self) -> Counters:
        """What it did since it was made."""

    @property
    def costs(self) -> Costs:
        """What steps and proposals take, as far as it is known."""

    async def start(self) -> None:
        """Begin to connect."""

    async def close(self) -> None:
        """End all streams and links."""

    async def tokenizer_files(self) -> dict[str, bytes]:
        """The target's tokenizer files by name."""

    def open(self, request: DecodingRequest) -> BackendStream:
        """Begin an answer."""
