"""Stream: the caller's end of one answer, an asynchronous iterator of emissions."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator

from coordinator.link import Link
from coordinator.request import Emission, StreamStats
from coordinator.rows import VerifyRow
from coordinator.state import StreamState
from outrider.errors import OutriderError
from outrider.seam import VerdictBatch

_MAX_U32 = 2**32 - 1
_REMEMBERED = 1_024
"""Ended streams in the dense form whose states are kept, the latest ones; far more than are ever in flight."""


class Stream:
    """Yields emissions until the answer ends; raises the `OutriderError` that ended it otherwise.

    `aclose` ends it early and frees its KV on both services; so does exhausting it or an error. The attributes below
    `state` are the decoder's notes.

    Attributes:
        state: of the decoding loop.
        link: the target that decodes it, None while none is up.
        posted_s: when the item on the target link was posted.
        asked_s: when the item on the draft link was posted.
        held_until_s, held_for: no proposal is asked for before, and why (a key of `Counters.draft_skipped`).
        refusals: items that the target refused in a row.
        draining: whether its plain run is left to end because it is to draft again.
        trace: of its rounds; None for a request that is not traced.
    """

    __slots__ = (
        "_emissions",
        "_ended",
        "_error",
        "_on_close",
        "_waiter",
        "asked_s",
        "deadline",
        "deadline_s",
        "draining",
        "held_for",
        "held_until_s",
        "link",
        "posted_s",
        "refusals",
        "state",
        "trace",
    )

    def __init__(self, state: StreamState, deadline_s: float, on_close: Callable[[Stream], None]) -> None:
        self.state = state
        self.deadline_s = deadline_s
        self.deadline: asyncio.TimerHandle | None = None
        self.link: Link[VerifyRow, VerdictBatch] | None = None
        self.posted_s = 0.0
        self.asked_s = 0.0
        self.held_until_s = 0.0
        self.held_for = "held"
        self.refusals = 0
        self.draining = False
        self.trace = state.request.trace.stream() if state.request.trace is not None else None
        self._on_close = on_close
        self._emissions: deque[Emission] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: OutriderError | None = None
        self._ended = False

    @property
    def left_ms(self) -> int:
        """Milliseconds until its deadline."""
        return min(max(1, round(1_000 * (self.deadline_s - time.monotonic()))), _MAX_U32)

    @property
    def stats(self) -> StreamStats:
        """What speculation has done so far."""
        return self.state.stats

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Emission:
        while not self._emissions:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._emissions.popleft()

    async def aclose(self) -> None:
        """Ends the answer; what both services hold of it is freed. Safe to call at any time, any number of times."""
        self._emissions.clear()
        self._error = None
        self.end()
        self._on_close(self)

    def hold(self, until_s: float, reason: str = "held") -> None:
        """Asks for no proposal until then."""
        self.held_until_s, self.held_for = until_s, reason

    def push(self, emission: Emission) -> None:
        """Hands tokens to the reader."""
        self._emissions.append(emission)
        self._rouse()

    def end(self, error: OutriderError | None = None) -> None:
        """No more tokens will come; the reader gets what is left, then the error if there is one."""
        if not self._ended:
            self._ended, self._error = True, error
            self._rouse()

    def _rouse(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Registry:
    """All open streams.

    Attributes:
        states: their states by id, for the decoding loop, and those of streams whose rows may still come.
    """

    def __init__(self) -> None:
        self.states: dict[int, StreamState] = {}
        self._streams: dict[int, Stream] = {}
        # By group of requests with one prompt, the stream that reads it.
        self._firsts: dict[int, int] = {}
        self._remembered: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def __getitem__(self, stream_id: int) -> Stream:
        return self._streams[stream_id]

    def get(self, stream_id: int | None) -> Stream | None:
        """The open stream of an id."""
        return None if stream_id is None else self._streams.get(stream_id)

    def add(self, stream: Stream) -> None:
        """Takes in a stream; it is a fork of the open one that began its group, or begins the group itself."""
        group = stream.state.request.prompt_group
        if group:
            first = self._firsts.setdefault(group, stream.state.stream_id)
            stream.state.fork_of = first if first in self._streams else None
        self._streams[stream.state.stream_id] = stream
        self.states[stream.state.stream_id] = stream.state

    def remove(self, stream: Stream) -> bool:
        """Lets go of a stream; False if it was gone already."""
        stream_id = stream.state.stream_id
        if self._streams.pop(stream_id, None) is None:
            return False
        group = stream.state.request.prompt_group
        if self._firsts.get(group) == stream_id:
            del self._firsts[group]
        if stream.state.request.draws_dense:
            # Messages to come may hold rows of it, at the latest when a long step ends; only its state can tell.
            self._remembered.append(stream_id)
            if len(self._remembered) <= _REMEMBERED:
                return True
            stream_id = self._remembered.popleft()
        del self.states[stream_id]
        return True
