"""CPU time that the coordinator spends on one round of many streams, and the bytes that it sends and receives.

    python bench/coordinator_cost.py [--streams 64] [--gamma 5] [--support 32] [--rounds 300]

A round is: ask the draft, read its proposals, send them to the target, read the verdicts, apply the rule, commit. No
sockets and no services: this is what the coordinator's own code costs per round, whatever the network does. The bars:
encoding, decoding and the rule together stay under 1 ms for 64 streams, and a proposal under 1,100 bytes per
stream-round at k = 32, gamma = 5.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from coordinator import acceptance, decoding
from coordinator.request import DecodingRequest
from coordinator.rows import propose_batch, verify_batch
from coordinator.state import StreamState, new_stream
from outrider.distribution import quantise
from outrider.rpc.codec import (
    proposal_from_pb,
    proposal_to_pb,
    propose_to_pb,
    verdict_from_pb,
    verdict_to_pb,
    verify_to_pb,
)
from outrider.sampling import SamplingParams
from outrider.seam import Items, ProposalBatch, Replies, Slots, VerdictBatch

BAR_MS = 1.0
BAR_BYTES = 1_100
CONTEXT = 1 << 20
DEADLINES = {"stream_deadline_ms": 60_000}


class Stopwatch:
    """CPU milliseconds by stage, summed within a round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        start = time.process_time_ns()
        yield
        spent = self.rounds[-1]
        spent[stage] = spent.get(stage, 0.0) + (time.process_time_ns() - start) / 1e6

    def medians(self) -> dict[str, float]:
        return {stage: statistics.median(spent[stage] for spent in self.rounds) for stage in self.rounds[0]}


def echo(items: Items, cached: int) -> Replies:
    return Replies(
        stream_ids=items.stream_ids,
        generations=items.generations,
        committed_lengths=items.committed_lengths,
        statuses=np.zeros(len(items), np.uint8),
        cached_lengths=items.committed_lengths + np.uint32(cached),
    )


def proposal(items: Items, gamma: int, support: int, random: np.random.Generator) -> ProposalBatch:
    """What a draft model answers: `support` ids per slot."""
    slots = len(items) * gamma
    ids = np.sort(np.array([random.choice(32_000, support, replace=False) for _ in range(slots)]), axis=1)
    row = quantise(np.arange(support), random.dirichlet(np.full(support, 0.3)) + 1e-4)
    drawn = random.integers(support, size=slots)
    return ProposalBatch(
        replies=echo(items, gamma - 1),
        slots=Slots(
            per_item=np.full(len(items), gamma, np.uint8),
            draft_ids=ids[np.arange(slots), drawn].astype(np.uint32),
            own_counts=(row.counts[drawn] - 1).astype(np.uint16),
            support_sizes=np.full(slots, support, np.uint16),
            q_ids=ids.ravel().astype(np.uint32),
            q_counts=np.tile(row.counts - 1, slots).astype(np.uint16),
            dense_q=np.empty(0, np.float32),
        ),
    )


def verdict(items: Items, gamma: int, random: np.random.Generator) -> VerdictBatch:
    slots = len(items) * gamma
    return VerdictBatch(
        replies=echo(items, gamma),
        slots_done=np.full(len(items), gamma, np.uint8),
        cuts=np.zeros(len(items), np.uint8),
        p=random.random(slots, np.float32) * 0.2,
        emit=random.integers(32_000, size=slots).astype(np.uint32),
        bonus=random.integers(32_000, size=len(items)).astype(np.uint32),
        dense_p=np.empty(0, np.float32),
    )


def run(streams: int, gamma: int, support: int, rounds: int) -> tuple[Stopwatch, dict[str, int]]:
    random, watch, sizes = np.random.default_rng(0), Stopwatch(), {}
    request = DecodingRequest(prompt_ids=tuple(range(1, 200)), params=SamplingParams(max_tokens=1_000_000))
    states: dict[int, StreamState] = {i: new_stream(i, request, seed=i) for i in range(1, streams + 1)}

    for _ in range(rounds):
        watch.rounds.append({})
        with watch.time("transitions"):
            asked = [decoding.propose(s, gamma, draft_deadline_ms=20, **DEADLINES) for s in states.values()]
        with watch.time("columns"):
            question = propose_batch(asked, [])
        with watch.time("encode propose"):
            sizes["encode propose"] = len(propose_to_pb(question).SerializeToString())

        message = proposal_to_pb(proposal(question.items, gamma, support, random))
        data, kind = message.SerializeToString(), type(message)
        sizes["decode proposal"] = len(data)
        with watch.time("decode proposal"):
            proposals = proposal_from_pb(kind.FromString(data))
        with watch.time("split"):
            answers = decoding.receive_proposals(states, proposals)

        with watch.time("transitions"):
            sent = [decoding.verify(a.state, a.proposal, **DEADLINES) for a in answers]
        with watch.time("columns"):
            check = verify_batch(sent, [])
        with watch.time("encode verify"):
            sizes["encode verify"] = len(verify_to_pb(check).SerializeToString())

        message = verdict_to_pb(verdict(check.items, gamma, random))
        data, kind = message.SerializeToString(), type(message)
        sizes["decode verdict"] = len(data)
        with watch.time("decode verdict"):
            verdicts = verdict_from_pb(kind.FromString(data))
        with watch.time("rule"):
            acceptance.accept(dict(enumerate(states.values())), list(states.values()), verdicts)
        with watch.time("commit and emit"):
            decoding.receive_verdicts(states, verdicts, CONTEXT)
        # The rule was timed alone and ran again inside.
        watch.rounds[-1]["commit and emit"] -= watch.rounds[-1]["rule"]
    return watch, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("streams", 64), ("gamma", 5), ("support", 32), ("rounds", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    watch, sizes = run(options.streams, options.gamma, options.support, options.rounds)

    print(f"{options.streams} streams, gamma {options.gamma}, k = {options.support}: median CPU milliseconds per round")
    total = watch.medians()
    for stage, milliseconds in total.items():
        bytes_note = f"{sizes[stage] / options.streams:8.0f} bytes per stream" if stage in sizes else ""
        print(f"  {stage:<18}{milliseconds:8.3f}{bytes_note}")
    wire = sum(ms for stage, ms in total.items() if stage.startswith(("encode", "decode")) or stage == "rule")
    print(f"  encode + decode + rule {wire:.3f} ms (bar {BAR_MS}), everything {sum(total.values()):.3f} ms")
    per_proposal = sizes["decode proposal"] / options.streams
    print(f"  a proposal takes {per_proposal:.0f} bytes per stream-round (bar {BAR_BYTES})")


if __name__ == "__main__":
    main()
