"""Does memory stay flat while a stack serves for half an hour?

    python bench/soak.py --minutes 30 [--streams 16] [--target smollm2-135m] [--draft ngram]

Starts a stack (Ray, coordinator, draft, target) and keeps so many streams busy through the gRPC door: prompts and
answers of all lengths, greedy and sampled, with and without seeds, several samples, and one request in eight is given
up in the middle. Every `--every` seconds the resident memory of each kind of process is noted.

Printed: the curve; per kind of process the slope of a straight line through the second half, in MB per hour, and the
growth over that half; open streams and used KV blocks of both services before and after. A table of all samples goes to
`--out`. Bars: used blocks and open streams are what they were; no kind grew by more than 2 % over the second half. The
exit status is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import grpc
import numpy as np
import psutil

from loadtest.prompts import load
from outrider.client import Answer, Client, request
from outrider.errors import OutriderError
from outrider.fetch.reporter import LogReporter
from outrider.local.options import StackOptions
from outrider.local.stack import make_plan, private
from outrider.v1 import common_pb2, draft_pb2_grpc, target_pb2_grpc

GROWTH_BAR = 0.02
GIVEN_UP = 8
SETTLE_S = 3.0
PARTS = ("target_service", "draft_service", "coordinator", "ServeReplica", "raylet", "gcs_server", "dashboard", "ray")
STUBS = {"target": target_pb2_grpc.TargetServiceStub, "draft": draft_pb2_grpc.DraftServiceStub}


def main() -> int:
    arguments = _arguments()
    options = StackOptions(target=arguments.target, draft=arguments.draft, profile_seconds=0)
    with private(options, make_plan(options), LogReporter(), print) as stack:
        addresses = {role: address for role in STUBS if (address := getattr(stack.state, role))}
        before = {role: _held(role, address) for role, address in addresses.items()}
        samples, asked = _soak(stack.state.grpc, arguments)
        time.sleep(SETTLE_S)
        after = {role: _held(role, address) for role, address in addresses.items()}
    _write(arguments.out, samples)
    grown = _report(samples)
    print(f"{asked['finished']} requests finished, {asked['given up']} given up, {asked['failed']} failed")
    for role in addresses:
        print(f"{role}: (open streams, used blocks) {before[role]} before, {after[role]} after")
    flat = max(grown.values()) <= GROWTH_BAR
    kept = before == after
    print(f"memory {'flat' if flat else 'grows'}; blocks {'as before' if kept else 'lost'}")
    figures = {"minutes": arguments.minutes, "streams": arguments.streams, "growth": grown, **asked}
    print(json.dumps({"bench": "soak", **figures, "blocks_kept": kept, "flat": flat}))
    return 0 if flat and kept else 1


def _soak(address: str, arguments: argparse.Namespace) -> tuple[list[tuple[float, Counter[str]]], Counter[str]]:
    """Memory over time, and what became of the requests."""
    texts = [prompt.text for prompt in load("auto", arguments.dataset).prompts]
    end_s = time.monotonic() + 60 * arguments.minutes
    asked: Counter[str] = Counter()
    threads = [
        threading.Thread(target=_client, args=(address, index, texts, end_s, asked))
        for index in range(arguments.streams)
    ]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    samples = []
    while time.monotonic() < end_s:
        samples.append((time.monotonic() - began, _resident()))
        time.sleep(min(arguments.every, max(end_s - time.monotonic(), 0.0)))
    for thread in threads:
        thread.join()
    return samples, asked


def _client(address: str, index: int, texts: list[str], end_s: float, asked: Counter[str]) -> None:
    coins = random.Random(index)
    with Client(address) as client:
        while time.monotonic() < end_s:
            sampled = coins.random() < 0.5
            message = request(
                coins.choice(texts),
                chat=True,
                max_tokens=round(4 * 40 ** coins.random()),
                temperature=1.0 if sampled else 0.0,
                seed=coins.randrange(1 << 30) if sampled and coins.random() < 0.5 else None,
                speculate=coins.random() < 0.8,
                n=2 if coins.random() < 0.1 else None,
            )
            leave_after = coins.randrange(8) if coins.randrange(GIVEN_UP) == 0 else None
            answer = client.generate(message, Answer())
            outcome = "finished"
            try:
                for count, _ in enumerate(answer):
                    if count == leave_after:
                        outcome = "given up"
                        break
            except OutriderError as error:
                print(f"a request failed: {error}")
                outcome = "failed"
                time.sleep(1)
            finally:
                answer.close()  # type: ignore[attr-defined]
            asked[outcome] += 1


def _resident() -> Counter[str]:
    """Resident bytes by kind of process below this one."""
    sizes: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        try:
            name = " ".join(process.cmdline()[:8])
            sizes[next((part for part in PARTS if part in name), "other")] += process.memory_info().rss
        except psutil.Error:
            continue  # It ended meanwhile.
    return sizes


def _held(role: str, address: str) -> tuple[int, int]:
    """Open streams and used KV blocks of a service."""
    with grpc.insecure_channel(address) as channel:
        info = STUBS[role](channel).GetInfo(common_pb2.GetInfoRequest(), timeout=60).info
    return info.open_streams, info.kv_blocks_used


def _report(samples: list[tuple[float, Counter[str]]]) -> dict[str, float]:
    """Prints the curve; the growth of each kind over the second half."""
    kinds = sorted({kind for _, sizes in samples for kind in sizes}, key=lambda kind: -samples[-1][1][kind])
    print(f"{'minute':>7} " + " ".join(f"{kind[:14]:>14}" for kind in kinds) + "  (MB)")
    for at_s, sizes in samples[:: max(1, len(samples) // 20)]:
        print(f"{at_s / 60:7.1f} " + " ".join(f"{sizes[kind] / 1e6:14.1f}" for kind in kinds))
    second = samples[len(samples) // 2 :]
    grown = {}
    for kind in kinds:
        times, sizes = np.array([at_s for at_s, _ in second]), np.array([found[kind] for _, found in second])
        slope = float(np.polyfit(times, sizes, 1)[0]) if len(second) > 1 else 0.0
        grown[kind] = round(slope * float(times[-1] - times[0]) / max(float(sizes.mean()), 1.0), 4)
        print(f"{kind}: {slope * 3600 / 1e6:+.1f} MB per hour, {100 * grown[kind]:+.2f} % over the second half")
    return grown


def _write(path: Path | None, samples: list[tuple[float, Counter[str]]]) -> None:
    if path is None:
        return
    kinds = sorted({kind for _, sizes in samples for kind in sizes})
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["seconds", *(f"{kind}_bytes" for kind in kinds)])
        rows.writerows([round(at_s, 1), *(sizes[kind] for kind in kinds)] for at_s, sizes in samples)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--dataset", type=Path, help="prompts; unset: the load test's own")
    parser.add_argument("--out", type=Path, help="a CSV file for the curve")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
