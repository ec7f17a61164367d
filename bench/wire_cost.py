"""What the wire costs: CPU time to encode and decode a round's four messages and to apply the rule; bytes per stream.

    python bench/wire_cost.py                       64 streams, gamma 5, k 32
    python bench/wire_cost.py --streams 128 --k 128

Fails if encode + decode + rule take 1 ms or more of CPU for 64 streams, or if a proposal takes more than 1,100 bytes
per stream-round at gamma 5 and k 32. Times are thread CPU time, the median of many rounds; a round has a propose
request, a proposal, a verify request that carries the same q, and a verdict. "columns" is the draft's gathering of its
drafted slots, one object each, into the columns of the proposal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from draft_service.job import Answer, Slot, to_batch
from outrider.distribution import CountRow
from outrider.rpc import codec
from outrider.rpc.codec import Limits
from outrider.rule import accepted_counts
from outrider.seam import Items, ProposalBatch, ProposeBatch, Replies, Slots, Timings, VerdictBatch, VerifyBatch
from outrider.v1 import draft_pb2, target_pb2

ROUNDS = 400
BUDGET_MS = 1.0
BUDGET_BYTES = 1_100


class Round(NamedTuple):
    """The four messages of one round of many streams."""

    propose: ProposeBatch
    proposal: ProposalBatch
    verify: VerifyBatch
    verdict: VerdictBatch


def make_round(streams: int, gamma: int, k: int) -> Round:
    rng = np.random.default_rng(0)
    slots = streams * gamma
    sent = 2  # tokens that a round commits on average
    items = Items(
        stream_ids=rng.integers(0, 2**64, streams, dtype=np.uint64),
        generations=np.zeros(streams, np.uint32),
        committed_lengths=np.full(streams, 300 + sent, np.uint32),
        bases=np.full(streams, 300, np.uint32),
        prefix_hashes=rng.integers(0, 2**64, streams, dtype=np.uint64),
        token_counts=np.full(streams, sent, np.uint32),
        tokens=rng.integers(0, 50_000, streams * sent, dtype=np.uint32),
    )
    replies = Replies(
        stream_ids=items.stream_ids,
        generations=items.generations,
        committed_lengths=items.committed_lengths,
        statuses=np.zeros(streams, np.uint8),
        cached_lengths=items.committed_lengths,
    )
    drafted = Slots(
        per_item=np.full(streams, gamma, np.uint8),
        draft_ids=rng.integers(0, 50_000, slots, dtype=np.uint32),
        own_counts=rng.integers(1, 65_536, slots).astype(np.uint16),
        support_sizes=np.full(slots, k, np.uint16),
        q_ids=rng.integers(0, 50_000, slots * k, dtype=np.uint32),
        q_counts=rng.integers(0, 65_536, slots * k).astype(np.uint16),
        dense_q=np.empty(0, np.float32),
    )
    timings = Timings(
        queue_ms=0.1, forward_ms=5.0, sample_ms=0.5, total_ms=6.0, step_streams=streams, step_tokens=slots
    )
    return Round(
        ProposeBatch(
            items=items,
            slots=drafted.per_item,
            deadlines_ms=np.full(streams, 20, np.uint16),
            least_survivals=np.full(streams, 20_000, np.uint16),
        ),
        ProposalBatch(replies=replies, slots=drafted, timings=timings),
        VerifyBatch(items=items, slots=drafted, runs=np.zeros(streams, np.uint16)),
        VerdictBatch(
            replies=replies,
            slots_done=drafted.per_item,
            cuts=np.zeros(streams, np.uint8),
            p=rng.random(slots, dtype=np.float32),
            emit=rng.integers(0, 50_000, slots, dtype=np.uint32),
            bonus=rng.integers(0, 50_000, streams, dtype=np.uint32),
            dense_p=np.empty(0, np.float32),
            timings=timings,
        ),
    )


def make_answers(made: Round) -> list[Answer]:
    """The proposal of a round as the proposer holds it."""
    slots = made.proposal.slots
    ends = np.cumsum(slots.support_sizes, dtype=np.int64)[:-1]
    supports = zip(np.split(slots.q_ids, ends), np.split(slots.q_counts.astype(np.uint32) + 1, ends), strict=True)
    drafted = [
        Slot(token, count, CountRow(*support))
        for token, count, support in zip(slots.draft_ids.tolist(), slots.own_counts.tolist(), supports, strict=True)
    ]
    gamma = int(slots.per_item[0])
    return [
        Answer(stream_id, 0, 300, 300, drafted[index * gamma : (index + 1) * gamma])
        for index, stream_id in enumerate(made.proposal.replies.stream_ids.tolist())
    ]


def cpu_us(work: Callable[[], Any]) -> float:
    """Median CPU time of one call, in microseconds."""
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - began)
    return statistics.median(times) / 1_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--k", type=int, default=32)
    chosen = parser.parse_args()
    made = make_round(chosen.streams, chosen.gamma, chosen.k)
    limits = Limits(max_items=4_096, max_slots=16)
    messages: list[tuple[str, Callable[[], bytes], Callable[[bytes], Any]]] = [
        (
            "propose",
            lambda: codec.propose_to_pb(made.propose).SerializeToString(),
            lambda data: codec.propose_from_pb(draft_pb2.ProposeRequest.FromString(data), limits),
        ),
        (
            "proposal",
            lambda: codec.proposal_to_pb(made.proposal).SerializeToString(),
            lambda data: codec.proposal_from_pb(draft_pb2.ProposeResponse.FromString(data)),
        ),
        (
            "verify",
            lambda: codec.verify_to_pb(made.verify).SerializeToString(),
            lambda data: codec.verify_from_pb(target_pb2.VerifyRequest.FromString(data), limits),
        ),
        (
            "verdict",
            lambda: codec.verdict_to_pb(made.verdict).SerializeToString(),
            lambda data: codec.verdict_from_pb(target_pb2.VerifyResponse.FromString(data)),
        ),
    ]
    print(f"{chosen.streams} streams, gamma {chosen.gamma}, k {chosen.k}; CPU time per message, median of {ROUNDS}\n")
    print(f"{'message':10} {'bytes/stream':>12} {'encode us':>10} {'decode us':>10}")
    total_us = 0.0
    sizes: dict[str, float] = {}
    for name, encode, decode in messages:
        data = encode()
        sizes[name] = len(data) / chosen.streams
        encode_us, decode_us = cpu_us(encode), cpu_us(lambda decode=decode, data=data: decode(data))
        total_us += encode_us + decode_us
        print(f"{name:10} {sizes[name]:12.0f} {encode_us:10.1f} {decode_us:10.1f}")
    u = np.random.default_rng(1).random(chosen.streams * chosen.gamma)
    own_counts = made.proposal.slots.own_counts.astype(np.int64) + 1
    rule_us = cpu_us(lambda: accepted_counts(made.verdict.p, own_counts, u, made.verdict.slots_done))
    answers = make_answers(made)
    columns_us = cpu_us(lambda: to_batch(answers, Timings()))
    total_us += rule_us + columns_us
    print(f"{'columns':10} {'':12} {columns_us:10.1f}")
    print(f"{'rule':10} {'':12} {rule_us:10.1f}")
    print(f"{'total':10} {'':12} {total_us:10.1f}\n")
    small = chosen.streams <= 64 and chosen.gamma <= 5 and chosen.k <= 32
    passed = not small or (total_us < BUDGET_MS * 1_000 and sizes["proposal"] <= BUDGET_BYTES)
    print(
        json.dumps(
            {
                "streams": chosen.streams,
                "gamma": chosen.gamma,
                "k": chosen.k,
                "cpu_ms": round(total_us / 1_000, 4),
                "proposal_bytes_per_stream": round(sizes["proposal"], 1),
                "passed": passed,
            }
        )
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
