"""The controller against fixed gammas on a pair whose throughput is known in closed form, over real gRPC.

    python bench/stub_gamma.py --batch 1,8,12,16,32 --gamma auto,0,1,4

The pair is that of bench/timed_pair.py, its times multiplied by `--scale`. Every cell decodes with a coordinator's
`Decoder` of its own, so that the controller starts from nothing. Only the window in which all streams decode counts.

Columns: tokens per second; what the closed form gives for a fixed gamma; their ratio; for auto the ratio to the best
fixed gamma from 0 to 8; streams per target step; share of rounds that drafted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from bench.timed_pair import Streams, closed_form, timed_pair, until_connected, window
from coordinator.decoder import Decoder, DecoderConfig
from outrider.seam import Timings

GAMMA_MAX = 8


def main() -> None:
    arguments = _arguments()
    with timed_pair(arguments.scale) as (target, draft):
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
                max(closed_form(batch, g, arguments.scale) for g in range(GAMMA_MAX + 1))
                if fixed == "auto"
                else closed_form(batch, fixed, arguments.scale)
            )
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
    streams = Streams(decoder)
    try:
        await until_connected(decoder)
        await streams.hold(batch)
        await asyncio.sleep(settle_s)
        counters = decoder.counters
        rounds, drafts = counters.rounds, counters.num_drafts
        steps.clear()
        reached = await window(decoder, window_s)
        cell = {
            "batch": batch,
            "gamma": gamma,
            "output_throughput": round(reached, 2),
            "streams_per_step": round(sum(together for together, _ in steps) / max(len(steps), 1), 2),
            "drafted_share": round((counters.num_drafts - drafts) / max(counters.rounds - rounds, 1), 4),
        }
        await streams.hold(0)
        return cell
    finally:
        await decoder.close()


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
