"""Streams that tell an onlooker nothing but their length: even beats, even sizes.

A speculative stream comes in bursts, and their timing and sizes say how well the draft guessed, which is something
about the text. With pacing one write leaves at every beat, with whatever became certain since the last one, or nothing;
with padding a write's size is a multiple of a number of bytes. The filler is a comment of the event stream, which
clients skip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

_SHORTEST = len(b":\n\n")


def padded(data: bytes, size: int) -> bytes:
    """`data` and a comment, together a multiple of `size` bytes; 0 leaves it as it is."""
    missing = -len(data) % size if size else 0
    if not data and size:
        missing = size
    if not missing:
        return data
    while missing < _SHORTEST:
        missing += size
    return data + b":" + b" " * (missing - _SHORTEST) + b"\n\n"


class Pacer:
    """Writes what it is given at even beats, for as long as the block lasts; the rest leaves at the beat after it."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]], beat_s: float, pad: int) -> None:
        """
        Args:
            write: sends bytes to the client.
            beat_s: seconds between two writes.
            pad: as in `padded`; with 0 beats without text are silent.
        """
        self._write = write
        self._beat_s = beat_s
        self._pad = pad
        self._waiting = bytearray()
        self._ending = False
        self._task: asyncio.Task[None] | None = None

    def put(self, frame: bytes | None) -> None:
        """Leaves with the next beat."""
        self._waiting += frame or b""

    async def __aenter__(self) -> Pacer:
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        assert self._task is not None
        if kind is None:
            self._ending = True
            await self._task
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            ending, data = self._ending, bytes(self._waiting)
            self._waiting.clear()
            if out := padded(data, self._pad):
                await self._write(out)
            if ending:
                return
            next_s = max(next_s + self._beat_s, loop.time())  # a client that reads slowly moves the beat
            await asyncio.sleep(next_s - loop.time())
