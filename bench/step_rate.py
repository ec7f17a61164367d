"""Does the scheduler keep the engine busy, and how long do running streams stall while a long prompt is read?

    python bench/step_rate.py [--model smollm2-135m] [--streams 32] [--requests 96]

Without `--model` the target is a timed stub (60 ms for 32 streams), so that what is measured is the code around the
model; with it, the model's own passes compete with the messages for the cores. Decoding is plain.

- *step rate*: so many requests with prompts of 8 to 1,000 tokens and answers of 16 to 256 keep `--streams` streams
  decoding. Every step is noted while all streams are at work, and the same batches are run again afterwards in a bare
  loop: the model, then judging the rows. Bar: 0.9 of the bare loop's rate.
- *stall*: all streams decode without end; then prompts of 2,000 tokens arrive, one after the other. The 99th percentile
  of the time between a stream's tokens while one is read, over that before. Bar: 2.5 times. (A step with prompt rows
  may take twice the plain step or 100 ms, whichever is longer, so with steps below 40 ms the bar is missed on purpose.)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from bench.recorded_target import RecordedTarget, Recording, recorded_target
from coordinator.decoder import Decoder, DecoderConfig, DecodingRequest
from outrider.sampling import SamplingParams

RATE_BAR, STALL_BAR = 0.9, 2.5
STUB = "stub:markov?fixed_ms=28&token_ms=1&prefill_token_ms=0.5"
LONG = 2_000
PROMPTS, ANSWERS = (8, 1_000), (16, 256)
IDS = 250
"""Prompts are made of the ids below, which the stub has too."""


def main() -> None:
    arguments = _arguments()
    flags = ["--model", arguments.model, "--max-num-seqs", "64", "--profile-seconds", "0"]
    if arguments.threads:
        flags += ["--threads", str(arguments.threads)]
    with recorded_target(flags) as target:
        before, during = asyncio.run(_stall(target.address, arguments))
        recording = asyncio.run(_rate(target, arguments))
    rate = recording.bare_s / recording.seconds
    print(
        f"{arguments.model}, {arguments.streams} streams of mixed length: {recording.steps} steps of "
        f"{recording.streams:.1f} streams and {recording.rows:.1f} rows, {recording.steps / recording.seconds:.2f} a "
        f"second; bare loop {recording.steps / recording.bare_s:.2f}; ratio {rate:.3f} "
        f"({'met' if rate >= RATE_BAR else 'missed'}: {RATE_BAR}); in the model "
        f"{recording.forward_s / recording.seconds:.3f} of the time"
    )
    p99 = [1_000 * float(np.percentile(gaps, 99)) for gaps in (before, during)]
    median = [1_000 * float(np.median(gaps)) for gaps in (before, during)]
    stall = p99[1] / p99[0]
    print(
        f"{arguments.streams} running streams: {median[0]:.1f} ms between tokens (p99 {p99[0]:.1f}); while a prompt of "
        f"{LONG} tokens is read {median[1]:.1f} (p99 {p99[1]:.1f}, {len(during)} gaps); ratio of p99 {stall:.2f} "
        f"({'met' if stall <= STALL_BAR else 'missed'}: {STALL_BAR})"
    )
    figures = {"model": arguments.model, "streams": arguments.streams, "rate": round(rate, 4), "stall": round(stall, 3)}
    print(json.dumps({"bench": "step_rate", **figures, "p99_ms": [round(value, 2) for value in p99]}))


async def _rate(target: RecordedTarget, arguments: argparse.Namespace) -> Recording:
    """The steps from the time when all streams decode until no request is left to replace one that ends."""
    coins = random.Random(1)
    waiting = [_request(coins, _between(coins, PROMPTS), _between(coins, ANSWERS)) for _ in range(arguments.requests)]
    async with _decoder(target.address) as decoder:
        over = asyncio.Event()
        begun = 0

        async def seat() -> None:
            nonlocal begun
            while waiting and not over.is_set():
                stream = decoder.open(waiting.pop())
                first = True
                async for _ in stream:
                    if first:
                        begun += 1
                        first = False
                        if begun == arguments.streams:
                            target.begin()
                    if over.is_set():
                        break
                await stream.aclose()
            over.set()  # The others' ends would be steps of fewer and fewer streams.

        await asyncio.gather(*(seat() for _ in range(arguments.streams)))
    return await asyncio.to_thread(target.replay)


async def _stall(address: str, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds between the tokens of running streams: before, and while a long prompt is read."""
    coins = random.Random(2)
    windows: dict[str, list[float]] = {"settling": [], "before": [], "during": []}
    now = "settling"
    async with _decoder(address) as decoder:

        async def run(request: DecodingRequest) -> None:
            last = math.nan
            stream = decoder.open(request)
            try:
                async for _ in stream:
                    at = time.perf_counter()
                    if not math.isnan(last):
                        windows[now].append(at - last)
                    last = at
            finally:
                await stream.aclose()

        running = [
            asyncio.create_task(run(_request(coins, _between(coins, (8, 200)), 1_000_000)))
            for _ in range(arguments.streams)
        ]
        await asyncio.sleep(arguments.settle_s)
        now = "before"
        await asyncio.sleep(arguments.before_s)
        for _ in range(arguments.long_prompts):
            now = "during"
            stream = decoder.open(_request(coins, LONG, 1))
            async for _ in stream:
                pass
            now = "settling"
            await asyncio.sleep(1.0)
        for task in running:
            task.cancel()
        for result in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
    return windows["before"], windows["during"]


def _request(coins: random.Random, prompt: int, answer: int) -> DecodingRequest:
    ids = tuple(coins.randrange(1, IDS) for _ in range(prompt))
    return DecodingRequest(prompt_ids=ids, params=SamplingParams(temperature=0.0, max_tokens=answer))


def _between(coins: random.Random, bounds: tuple[int, int]) -> int:
    """Even on a logarithmic scale: many short ones, few long ones."""
    return round(math.exp(coins.uniform(*map(math.log, bounds))))


@asynccontextmanager
async def _decoder(address: str) -> AsyncIterator[Decoder]:
    decoder = Decoder(DecoderConfig(target=(address,), num_speculative_tokens=0))
    await decoder.start()
    try:
        await _until(lambda: decoder.state.targets_up == 1)
        yield decoder
    finally:
        await decoder.close()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=STUB, help="a stub, or a model by name or folder")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--long-prompts", type=int, default=3)
    parser.add_argument("--settle-s", type=float, default=4.0)
    parser.add_argument("--before-s", type=float, default=10.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
