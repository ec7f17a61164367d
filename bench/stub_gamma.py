"""The controller against fixed gammas on a pair whose throughput is known in closed form, over real gRPC.

    python bench/stub_gamma.py --batch 1,8,12,16,32 --gamma auto,0,1,4

Starts the timed stub pair (a target step takes 10 ms up to 16 rows and 0.5 ms for each further one, a drafted slot
1 ms, acceptance .8; all of it times `--scale`, so that the system's own cost stays small) as two processes and decodes
with a coordinator's `Decoder` of its own for every cell, so that the controller starts from nothing. Only the window in
which all streams decode is counted. Stubs sleep and do not compute, but a machine too busy to wake them in time shows.

Columns: tokens per second; what the closed form gives for a fixed gamma; their ratio; for auto the ratio to the best
fixed gamma from 0 to 8; streams per target step; share of rounds that drafted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.processes import services
from coordinator.decoder import Decoder, DecoderConfig, DecodingRequest
from outrider.economics import LinearCost, tokens_per_s
from outrider.sampling import SamplingParams
from outrider.seam import Timings

STEP = LinearCost(fixed_s=0.010, token_s=0.0005, free_tokens=16)
SLOT_S = 0.001
GAMMA_MAX = 8


def main() -> None:
    arguments = _arguments()
    with _pair(arguments.scale) as (target, draft):
        cells = asyncio.run(_sweep(target, draft, arguments))
    print(json.dumps({"cells": cells}))


async def _sweep(target: str, draft: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    print(
        f"{'batch':>5} {'gamma':>5} {'tokens/s':>9} {'expected':>9} {'ratio':>6} {'streams':>8} {'drafted':>8}",
        flush=True,
    )
    cells = []
    for batch in (int(text) for text in arguments.batch.split(",")):
        for gamma in arguments.gamma.split(","):
            fixed = "auto" if gamma == "auto" else int(gamma)
            cell = await _cell(target, draft, batch, fixed, arguments.settle_s, arguments.window_s)
            expected = (
                max(_closed_form(batch, g) for g in range(GAMMA_MAX + 1))
                if fixed == "auto"
                else _closed_form(batch, fixed)
            )
            expected /= arguments.scale
            cell |= {"expected": round(expected, 2), "ratio": round(cell["output_throughput"] / expected, 4)}
            cells.append(cell)
            print(
                f"{batch:5} {gamma:>5} {cell['output_throughput']:9.2f} {expected:9.2f} {cell['ratio']:6.3f} "
                f"{cell['streams_per_step']:8.2f} {cell['drafted_share']:8.4f}",
                flush=True,
            )
    return cells


async def _cell(target: str, draft: str, batch: int, gamma: Any, settle_s: float, window_s: float) -> dict[str, Any]:
    decoder = Decoder(DecoderConfig(target=(target,), draft=draft, num_speculative_tokens=gamma))
    steps: list[tuple[int, int]] = []

    def on_step(part: str, timings: Timings) -> None:
        if part == "target" and timings.step_tokens:
            steps.append((timings.step_streams, timings.step_tokens))

    decoder.counters.on_step.append(on_step)
    await decoder.start()
    try:
        while decoder.state.draft is None or not decoder.state.targets_up:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        params = SamplingParams(max_tokens=1_000_000, temperature=0.0)
        streams = [
            decoder.open(DecodingRequest(prompt_ids=(65 + index % 26,), params=params)) for index in range(batch)
        ]
        readers = [asyncio.create_task(_read(stream)) for stream in streams]
        await asyncio.sleep(settle_s)
        counters = decoder.counters
        tokens, rounds, drafts, since_s = (
            counters.generated_tokens,
            counters.rounds,
            counters.num_drafts,
            time.monotonic(),
        )
        steps.clear()
        await asyncio.sleep(window_s)
        elapsed_s = time.monotonic() - since_s
        cell = {
            "batch": batch,
            "gamma": gamma,
            "output_throughput": round((counters.generated_tokens - tokens) / elapsed_s, 2),
            "streams_per_step": round(sum(streams for streams, _ in steps) / max(len(steps), 1), 2),
            "drafted_share": round((counters.num_drafts - drafts) / max(counters.rounds - rounds, 1), 4),
        }
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        return cell
    finally:
        await decoder.close()


async def _read(stream: Any) -> None:
    async for _ in stream:
        pass


def _closed_form(batch: int, gamma: int) -> float:
    """Tokens per second at the stated times."""
    return tokens_per_s(batch, gamma, 0.8, STEP, SLOT_S * gamma)


@contextmanager
def _pair(scale: float) -> Iterator[tuple[str, str]]:
    """The two services as processes of their own; yields their addresses."""
    models = {
        "target": f"stub:markov?fixed_ms={10 * scale}&free_tokens=16&token_ms={0.5 * scale}",
        "draft": f"stub:accept?p=0.8&token_ms={scale}",
    }
    flags = {role: ("--model", model, "--profile-seconds", "0") for role, model in models.items()}
    with services(flags) as addresses:
        yield addresses["target"], addresses["draft"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,8,12,16,32")
    parser.add_argument("--gamma", default="auto,0,1,4")
    parser.add_argument("--scale", type=float, default=10, help="all times so many times the stated ones")
    parser.add_argument("--settle-s", type=float, default=6.0)
    parser.add_argument("--window-s", type=float, default=15.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
