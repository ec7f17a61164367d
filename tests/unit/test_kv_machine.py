"""KV accounts under any history: a random walk of opens, rounds, retries, forks, preemptions, cuts and closes.

The KV is modelled by what it stands for: place by place, a hash over all tokens up to that position. So whatever is
shared, copied, rewound, evicted or found again, every position that a stream counts as cached must hold the hash of
that stream's own tokens; and after each step blocks, tables and index must agree.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.engine.block_manager import BlockManager
from outrider.engine.formation import Work
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Sequence
from outrider.engine.streams import Streams
from outrider.sampling import SamplingParams
from outrider.seam import StreamOpen, prefix_hash
from target_service.kv_pool import KVPool

OWNERS = (b"a" * 16, b"b" * 16)
BLOCK = 4
MOST = 40


class KVMachine(RuleBasedStateMachine):
    """A target's engine without a model."""

    @initialize(blocks=st.integers(12, 24), reuse=st.booleans())
    def begin(self, blocks: int, reuse: bool) -> None:
        self.now = 0.0
        self.pool = BlockManager(blocks, BLOCK, reuse=reuse)
        self.streams = Streams(self.pool, 10.0, lambda: 0.0)
        for owner in OWNERS:
            self.streams.attach(owner, 1)
        self.known: dict[int, Any] = {}
        kv_pool = KVPool(self.pool, self.streams, self.known.__getitem__)
        self.evictions: dict[int, int] = {}
        release = kv_pool.release
        kv_pool.release = self.evict(release)  # type: ignore[method-assign]
        self.scheduler = Scheduler(kv_pool, max_num_seqs=4, max_num_batched_tokens=24, clock=lambda: self.now)
        self.kv = [[0] * BLOCK for _ in range(blocks)]
        self.truth: dict[int, list[int]] = {}
        self.work: dict[int, tuple[int, int]] = {}  # rows of the tail, committed length
        self.next_id = 0

    def evict(self, release: Any) -> Any:
        def counted(stream_id: int) -> None:
            self.evictions[stream_id] = self.evictions.get(stream_id, 0) + 1
            release(stream_id)

        return counted

    def sequence(self, stream_id: int) -> Sequence:
        found = self.streams.get(stream_id)
        assert found is not None
        return found

    @rule(kind=st.integers(0, 2), length=st.integers(1, 24), salt=st.integers(0, 1), fork=st.booleans())
    def open(self, kind: int, length: int, salt: int, fork: bool) -> None:
        if len(self.truth) == 6:
            return
        stream_id = self.next_id = self.next_id + 1
        parents = list(self.truth)
        parent = parents[length % len(parents)] if fork and parents else None
        if parent is not None:
            length = self.sequence(parent).opened.prompt_length
            tokens, owner = self.truth[parent][:length], self.sequence(parent).owner
            salt = self.sequence(parent).opened.cache_salt
        else:
            tokens, owner = [kind] * length, OWNERS[stream_id % 2]
        opened = StreamOpen(
            stream_id=stream_id,
            prompt_length=length,
            params=SamplingParams(),
            fork_of=parent,
            cache_salt=salt,
        )
        sequence = self.streams.open(opened, owner)
        self.known[stream_id] = SimpleNamespace(sequence=sequence, feature_window=0, prompt=None, scores_prompt=False)
        self.truth[stream_id] = tokens
        self.scheduler.open(stream_id, owner=owner, fork_of=parent)
        self.send(stream_id, [])

    def send(self, stream_id: int, x: list[int], base: int = 0) -> None:
        """An item: the committed tokens, and drafted ones behind them."""
        truth, sequence = self.truth[stream_id], self.sequence(stream_id)
        self.streams.sync(
            stream_id,
            sequence.owner,
            sequence.generation,
            base=base,
            tokens=truth[base:],
            committed=len(truth),
            base_hash=prefix_hash(truth[:base]),
        )
        sequence.tokens.extend(x)
        tail, known = len(x) + 1, len(sequence.tokens)
        self.streams.kv.rewind(sequence, min(sequence.cached, known - tail))
        rows = known - min(sequence.cached, known - tail)
        self.work[stream_id] = (tail, len(truth))
        self.scheduler.submit(stream_id, Work(known, rows, tail, most=MOST + 5), arrived_s=self.now)

    @precondition(lambda self: set(self.truth) - set(self.work))
    @rule(pick=st.integers(0, 9), accepted=st.integers(0, 4), slots=st.integers(0, 4), coin=st.integers(0, 9))
    def round(self, pick: int, accepted: int, slots: int, coin: int) -> None:
        """The next round of an idle stream: some of what was drafted accepted, one token more; or the same again."""
        idle = sorted(set(self.truth) - set(self.work))
        stream_id = idle[pick % len(idle)]
        sequence, truth = self.sequence(stream_id), self.truth[stream_id]
        if coin:
            drafted = sequence.tokens[len(truth) :]
            truth += [*drafted[:accepted], coin % 3]
        if len(truth) >= MOST:
            self.close(stream_id)
        else:
            self.send(stream_id, [(coin + i) % 3 for i in range(slots)])

    @precondition(lambda self: self.truth)
    @rule(pick=st.integers(0, 9), back=st.integers(1, 12))
    def say_something_else(self, pick: int, back: int) -> None:
        """A coordinator that commits other tokens than before, far behind what is shared: wrong, and survived."""
        stream_id = sorted(self.truth)[pick % len(self.truth)]
        truth = self.truth[stream_id]
        at = max(len(truth) - back, 0)
        self.truth[stream_id] = [*truth[:at], *(7 for _ in truth[at:])]
        self.send(stream_id, [1])

    @precondition(lambda self: self.truth)
    @rule(pick=st.integers(0, 9))
    def close_one(self, pick: int) -> None:
        self.close(sorted(self.truth)[pick % len(self.truth)])

    def close(self, stream_id: int) -> None:
        assert self.streams.close(stream_id, self.sequence(stream_id).owner)
        self.scheduler.close(stream_id)
        del self.truth[stream_id]
        self.work.pop(stream_id, None)
        self.evictions.pop(stream_id, None)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            formation = self.scheduler.form()
            self.now += 0.01 if formation.wait_s is None else formation.wait_s
            for stream_id in formation.refused:
                self.close(stream_id)
            spans = []
            for piece in formation.pieces:
                tail, _ = self.work[piece.stream_id]
                sequence = self.sequence(piece.stream_id)
                spans.append(sequence.span(tail, limit=None if piece.last else piece.rows))
            for source, target, tokens in self.streams.kv.take_copies():
                self.kv[target] = [*self.kv[source][:tokens], *([0] * (BLOCK - tokens))]
            for span in spans:
                sequence = self.sequence(span.stream_id)
                for position in range(span.start, span.start + len(span.tokens)):
                    self.kv[span.blocks[position // BLOCK]][position % BLOCK] = sequence.hash_at(position + 1)
            for span in spans:
                self.sequence(span.stream_id).fed(span)
                self.streams.kv.publish(self.sequence(span.stream_id))
            self.scheduler.ran(formation.pieces, 0.01)
            for stream_id, _, last in formation.pieces:
                if last:
                    tail, _ = self.work.pop(stream_id)
                    self.scheduler.answered(stream_id, tail - 1)

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.streams.check_integrity()
        assert max(self.evictions.values(), default=0) <= 1
        pending = {target for _, target, _ in self.pool._copies}
        for sequence in self.streams:
            for position in range(sequence.cached):
                block = sequence.blocks[position // BLOCK]
                if block not in pending:
                    assert self.kv[block][position % BLOCK] == sequence.hash_at(position + 1)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for _ in range(300):  # whoever is waiting is served, once those that are done leave
            for stream_id in set(self.truth) - set(self.work):
                self.close(stream_id)
            if not self.work:
                break
            self.step(1)
        assert not self.work
        assert self.pool.free_blocks == self.pool.num_blocks
        assert not len(self.streams)


KVMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyHistory = KVMachine.TestCase


def test_a_walk_finds_what_it_is_meant_to_find() -> None:
    """Guards the machine above against vacuity: a fixed walk must preempt, share, fork and copy; and with the rule
    against writing shared blocks taken out, it must fail."""

    def walk(machine: KVMachine) -> tuple[int, int, int]:
        coins = random.Random(1)
        machine.begin(14, True)
        copies = 0
        for _ in range(400):
            kind = coins.randrange(6)
            if kind == 0:
                machine.open(coins.randrange(2), coins.randrange(8, 24), 0, coins.random() < 0.5)
            elif kind == 1 and set(machine.truth) - set(machine.work):
                machine.round(coins.randrange(9), coins.randrange(5), coins.randrange(5), coins.randrange(10))
            elif kind == 2 and machine.truth and coins.random() < 0.3:
                machine.say_something_else(coins.randrange(9), coins.randrange(1, 12))
            elif kind == 3 and machine.truth and coins.random() < 0.2:
                machine.close_one(coins.randrange(9))
            else:
                machine.step(1)
            copies += len(machine.pool._copies)
            machine.everything_agrees()
        return machine.scheduler.preemptions, machine.streams.kv.prefix_tokens.found, copies

    preemptions, found, _ = walk(KVMachine())
    assert preemptions > 5 and found > 100

    class Careless(KVMachine):
        def begin(self, blocks: int, reuse: bool) -> None:
            KVMachine.begin(self, blocks, reuse)
            self.streams.kv.rewind = self.forget_who_reads  # type: ignore[method-assign]

        def forget_who_reads(self, sequence: Sequence, start: int) -> None:
            sequence.shared = min(sequence.shared, start // BLOCK * BLOCK)

    try:
        walk(Careless())
    except (AssertionError, RuntimeError, ValueError):
        return
    raise AssertionError("writing where others read went unnoticed")
