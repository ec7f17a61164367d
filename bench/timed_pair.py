"""The timed stub pair with a closed form, as two processes, and streams that decode through a coordinator's `Decoder`.

A target step takes 10 ms up to 16 rows and 0.5 ms for each further one, a drafted slot 1 ms, acceptance is .8; all of
it times a scale, so that the system's own cost stays small beside it. Stubs sleep and do not compute, but a machine too
busy to wake them in time shows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from bench.processes import services
from coordinator.decoder import Decoder, DecodingRequest
from coordinator.streams import Stream
from outrider.economics import LinearCost, tokens_per_s
from outrider.sampling import SamplingParams

ALPHA = 0.8
STEP = LinearCost(fixed_s=0.010, token_s=0.0005, free_tokens=16)
SLOT_S = 0.001


@contextmanager
def timed_pair(scale: float) -> Iterator[tuple[str, str]]:
    """Starts both; yields the addresses of target and draft."""
    target = (
        f"fixed_ms={1e3 * STEP.fixed_s * scale}&free_tokens={STEP.free_tokens}&token_ms={1e3 * STEP.token_s * scale}"
    )
    models = {"target": f"stub:markov?{target}", "draft": f"stub:accept?p={ALPHA}&token_ms={1e3 * SLOT_S * scale}"}
    flags = {role: ("--model", model, "--profile-seconds", "0") for role, model in models.items()}
    with services(flags) as addresses:
        yield addresses["target"], addresses["draft"]


def closed_form(batch: int, gamma: int, scale: float) -> float:
    """Tokens per second of a batch that steps together."""
    return tokens_per_s(batch, gamma, ALPHA, STEP, SLOT_S * gamma) / scale


class Streams:
    """So many endless greedy streams at once as `hold` last said."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._open: list[tuple[Stream, asyncio.Task[None]]] = []
        self._opened = 0

    async def hold(self, count: int) -> None:
        """Opens what is missing, ends what is too much, the longest running first."""
        while len(self._open) < count:
            stream = self._decoder.open(
                DecodingRequest(
                    prompt_ids=(65 + self._opened % 26,), params=SamplingParams(max_tokens=1_000_000, temperature=0.0)
                )
            )
            self._opened += 1
            self._open.append((stream, asyncio.create_task(_read(stream))))
        ending, self._open = self._open[: len(self._open) - count], self._open[len(self._open) - count :]
        for _, reader in ending:
            reader.cancel()
        await asyncio.gather(*(reader for _, reader in ending), return_exceptions=True)
        for stream, _ in ending:
            await stream.aclose()


async def until_connected(decoder: Decoder, timeout_s: float = 60.0) -> None:
    """Raises:
    TimeoutError: a part did not answer.
    """
    async with asyncio.timeout(timeout_s):
        while decoder.state.draft is None or not decoder.state.targets_up:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def window(decoder: Decoder, seconds: float) -> float:
    """Tokens per second that all streams got in it."""
    counters = decoder.counters
    tokens, since_s = counters.generated_tokens, time.monotonic()
    await asyncio.sleep(seconds)
    return (counters.generated_tokens - tokens) / (time.monotonic() - since_s)


async def _read(stream: Stream) -> None:
    with suppress(asyncio.CancelledError):
        async for _ in stream:
            pass
