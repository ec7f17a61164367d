"""The controller under a load that crosses the crossover again and again, over real gRPC.

    python bench/square_wave.py [--low 8] [--high 24] [--periods 10]

The pair is that of bench/timed_pair.py, its times multiplied by `--scale`: at 8 streams gamma 1 gives 1.6 times plain
decoding, at 24 plain decoding is the better one. Streams are opened and ended so that the concurrency is a square wave.
First each fixed mode (gamma 0, gamma 4) holds both levels for one half period; then one coordinator with automatic
gamma goes through all periods. Every half period is cut into windows, the first of which begins with the change itself
and has its openings and ends in it. Bar: no window below 0.8 times the worse fixed mode at its level (a controller that
flaps, or takes seconds to notice, falls below). Printed beside it: the mean at each level over the better fixed mode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from typing import Any

from bench.timed_pair import Streams, timed_pair, until_connected, window
from coordinator.decoder import Decoder, DecoderConfig

FIXED = (0, 4)
BAR = 0.8


def main() -> None:
    arguments = _arguments()
    with timed_pair(arguments.scale) as (target, draft):
        found = asyncio.run(_measure(target, draft, arguments))
    print(json.dumps({"bench": "square_wave", **vars(arguments), **found}))


async def _measure(target: str, draft: str, arguments: argparse.Namespace) -> dict[str, Any]:
    levels = (arguments.low, arguments.high)
    fixed: dict[int, dict[int, float]] = {}
    for gamma in FIXED:
        waves = await _wave(target, draft, gamma, 1, arguments)
        fixed[gamma] = {level: statistics.mean(waves[0][level]) for level in levels}
        print(f"gamma {gamma}: {_by_level(fixed[gamma])}", flush=True)
    worse = {level: min(rates[level] for rates in fixed.values()) for level in levels}
    better = {level: max(rates[level] for rates in fixed.values()) for level in levels}
    waves = await _wave(target, draft, "auto", arguments.periods, arguments)
    mean = {level: statistics.mean(rate for wave in waves for rate in wave[level]) for level in levels}
    lowest = {level: min(rate / worse[level] for wave in waves for rate in wave[level]) for level in levels}
    print(f"auto: {_by_level(mean)}")
    for level in levels:
        print(
            f"  {level} streams: mean {mean[level] / better[level]:.3f} of the better fixed mode; lowest window "
            f"{lowest[level]:.3f} of the worse one (bar {BAR})"
        )
    return {
        "fixed": {str(gamma): _rounded(rates) for gamma, rates in fixed.items()},
        "auto": _rounded(mean),
        "over_better": _rounded({level: mean[level] / better[level] for level in levels}),
        "lowest_window_over_worse": _rounded(lowest),
        "passed": min(lowest.values()) >= BAR,
    }


async def _wave(
    target: str, draft: str, gamma: Any, periods: int, arguments: argparse.Namespace
) -> list[dict[int, list[float]]]:
    """Of every period, by level: tokens per second in its windows."""
    decoder = Decoder(DecoderConfig(target=(target,), draft=draft, num_speculative_tokens=gamma))
    await decoder.start()
    streams = Streams(decoder)
    try:
        await until_connected(decoder)
        await streams.hold(arguments.low)
        await asyncio.sleep(arguments.settle_s)
        waves = []
        for _ in range(periods):
            wave: dict[int, list[float]] = {}
            for level in (arguments.high, arguments.low):
                await streams.hold(level)
                wave[level] = [await window(decoder, arguments.window_s) for _ in range(arguments.windows)]
            waves.append(wave)
        await streams.hold(0)
        return waves
    finally:
        await decoder.close()


def _by_level(rates: dict[int, float]) -> str:
    return ", ".join(f"{rate:.1f} tokens/s at {level} streams" for level, rate in rates.items())


def _rounded(figures: dict[int, float]) -> dict[str, float]:
    return {str(level): round(figure, 3) for level, figure in figures.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--low", type=int, default=8, help="streams")
    parser.add_argument("--high", type=int, default=24, help="streams")
    parser.add_argument("--periods", type=int, default=10)
    parser.add_argument("--windows", type=int, default=4, help="per half period")
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--settle-s", type=float, default=6.0)
    parser.add_argument("--scale", type=float, default=4, help="all times so many times the stated ones")
    return parser.parse_args()


if __name__ == "__main__":
    main()
