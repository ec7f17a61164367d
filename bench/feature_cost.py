"""What an EAGLE-3 head's features cost on the way: bytes and CPU time of one round, for targets of several widths.

    python bench/feature_cost.py                32 streams, gamma 4, 3 rows kept of each round
    python bench/feature_cost.py --streams 8

Times are thread CPU time, the median of many rounds: the target gathers its rows and writes them, the coordinator reads
them, keeps the accepted ones and writes those for the draft, the draft reads them. Loopback or a network come on top.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from outrider.features import FeatureRequest, Features
from outrider.rpc.feature_codec import features_from_pb, features_to_pb
from outrider.v1 import common_pb2
from target_service.features import FeatureRing

WIDTHS = {"SmolLM2-135M": 576, "Qwen3-0.6B": 1024, "Llama-3.2-1B": 2048, "Llama-3.1-8B": 4096, "Llama-3.3-70B": 8192}
ROUNDS = 40
POSITION = 100


class Cost(NamedTuple):
    """Of one round: bytes to the coordinator and on to the draft, milliseconds of target, coordinator and draft."""

    sent: int
    passed_on: int
    target_ms: float
    coordinator_ms: float
    draft_ms: float


def measure(streams: int, rows: int, kept: int, width: int) -> Cost:
    """One round of many streams, of whose rows only the accepted ones go on."""
    request = FeatureRequest((2, 9, 15), 64)
    rng = np.random.default_rng(0)
    rings = []
    for _ in range(streams):
        ring = FeatureRing(request, request.row_bytes(width))
        ring.put(POSITION - 64, rng.integers(0, 256, (64 + rows, request.row_bytes(width)), np.uint8))
        rings.append(ring)

    def target() -> bytes:
        blocks = [(index, ring.block(POSITION, POSITION + rows)) for index, ring in enumerate(rings)]
        return _bytes(Features.of([(index, block) for index, block in blocks if block is not None]))

    def coordinator(data: bytes) -> bytes:
        features = features_from_pb(common_pb2.Features.FromString(data))
        return _bytes(Features.of([(index, block.before(POSITION + kept)) for index, block in features.blocks()]))

    sent, target_ms = _timed(target)
    passed_on, coordinator_ms = _timed(lambda: coordinator(sent))
    _, draft_ms = _timed(lambda: features_from_pb(common_pb2.Features.FromString(passed_on)))
    return Cost(len(sent), len(passed_on), target_ms, coordinator_ms, draft_ms)


def _bytes(features: Features) -> bytes:
    message = features_to_pb(features)
    assert message is not None
    return message.SerializeToString()


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        result = function()
        times.append((time.thread_time_ns() - began) / 1e6)
    return result, statistics.median(times)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--kept", type=int, default=3, help="rows of a round that belong to accepted tokens")
    arguments = parser.parse_args()
    print(f"{arguments.streams} streams, gamma {arguments.gamma}, {arguments.kept} of {arguments.gamma + 1} rows kept")
    print("target          bytes/row   KB to coordinator   KB to draft   ms target   coordinator   draft")
    for name, width in WIDTHS.items():
        cost = measure(arguments.streams, arguments.gamma + 1, arguments.kept, width)
        print(
            f"{name:15} {3 * width * 2:9,} {cost.sent / 1e3:19,.0f} {cost.passed_on / 1e3:13,.0f} "
            f"{cost.target_ms:11.2f} {cost.coordinator_ms:13.2f} {cost.draft_ms:7.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
