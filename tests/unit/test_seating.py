"""Who rides in a step: how much of a prompt, and whose turn it is."""

from __future__ import annotations

import pytest

from outrider.engine.chunk import FIRST_ROWS, LEAST_ROWS, ChunkSize
from outrider.engine.formation import Work
from outrider.engine.pace import StepTime
from outrider.engine.scheduler import Scheduler
from tests.unit.test_scheduler import Blocks, Clock


def test_a_prompt_beside_decoding_streams_keeps_the_step_within_its_limit() -> None:
    """Guards the gap that running streams see while a long prompt is read: twice the plain step, or 100 ms."""
    for plain_s, limit_s in ((0.030, 0.100), (0.200, 0.400)):
        plain = StepTime()
        plain.observe(8, plain_s)
        chunk = ChunkSize(plain)
        sizes = []
        for _ in range(12):
            rows = chunk.rows(decoding=8, waiting=0, budget=2048)
            sizes.append(rows)
            step_s = plain_s + 0.0005 * rows
            assert step_s <= 1.1 * limit_s
            chunk.observe(8 + rows, step_s)
        assert sizes[0] <= FIRST_ROWS, "nothing is known yet"
        assert sizes[-1] == pytest.approx((limit_s - plain_s) / 0.0005, rel=0.15), "the limit is used"


def test_a_prompt_gets_ahead_whatever_it_costs() -> None:
    """Guards against a prompt that is never read where a single row takes longer than the limit."""
    plain = StepTime()
    plain.observe(8, 0.01)
    chunk = ChunkSize(plain)
    chunk.observe(40, 3.0)
    assert chunk.rows(decoding=8, waiting=0, budget=2048) == LEAST_ROWS


def test_streams_on_their_way_bound_the_prompt_too() -> None:
    """Guards drafting streams: a prompt that fills the whole budget while they are away would hold them up."""
    clock = Clock()
    scheduler = Scheduler(Blocks(1000), max_num_seqs=8, max_num_batched_tokens=2048, clock=clock)
    scheduler.open(1)
    for tokens in range(8, 40, 5):
        scheduler.submit(1, Work(tokens, 5, 5), arrived_s=clock.now)
        scheduler.ran(scheduler.form().pieces, 0.03)
        scheduler.answered(1, 4)
        clock.now += 0.5
    clock.now -= 0.5
    scheduler.open(2)
    scheduler.submit(2, Work(1500, 1500, 1), arrived_s=clock.now)
    (piece,) = scheduler.form().pieces
    assert piece.stream_id == 2 and piece.rows <= FIRST_ROWS
    scheduler.close(1)
    (piece,) = scheduler.form().pieces
    assert piece.rows == 1500, "alone it is read at once"


def test_coordinators_take_turns() -> None:
    """Guards a coordinator with two streams beside one with forty that came first: seats for four in a step."""
    scheduler = Scheduler(Blocks(1000), max_num_seqs=4, max_num_batched_tokens=64, clock=Clock())
    for stream_id in range(42):
        scheduler.open(stream_id, owner=b"many" if stream_id < 40 else b"few")
        scheduler.submit(stream_id, Work(8, 1, 1), arrived_s=0.0)
    rode = [piece.stream_id for piece in scheduler.form().pieces]
    assert rode == [0, 40, 1, 41]


def test_a_fork_waits_for_its_parents_prompt_and_for_nothing_else() -> None:
    """Guards n samples against reading the prompt once each, and against one that waits for a parent that is gone."""
    scheduler = Scheduler(Blocks(1000), max_num_seqs=8, max_num_batched_tokens=32, clock=Clock())
    scheduler.open(1)
    scheduler.open(2, fork_of=1)
    scheduler.open(3)
    for stream_id in (1, 2, 3):
        scheduler.submit(stream_id, Work(40, 40, 1), arrived_s=0.0)
    assert [piece.stream_id for piece in scheduler.form().pieces] == [1]
    scheduler.ran(scheduler.form().pieces, 0.01)
    scheduler.ran(scheduler.form().pieces, 0.01)
    assert scheduler.form().pieces[0].stream_id == 2
    other = Scheduler(Blocks(1000), max_num_seqs=8, max_num_batched_tokens=64, clock=Clock())
    other.open(2, fork_of=1)
    other.submit(2, Work(40, 40, 1), arrived_s=0.0)
    assert [piece.stream_id for piece in other.form().pieces] == [2]


def test_a_stream_that_gave_way_once_is_spared() -> None:
    """Guards against the youngest stream losing its blocks again and again: next comes one that never did."""
    pool, clock = Blocks(8), Clock()
    scheduler = Scheduler(pool, max_num_seqs=8, max_num_batched_tokens=512, clock=clock)

    def step(stream_id: int, tokens: int, rows: int) -> None:
        clock.now += 100.0  # the others are idle, and not waited for
        scheduler.submit(stream_id, Work(tokens, rows, 1, most=48), arrived_s=clock.now)
        formed = scheduler.form()
        assert [piece.stream_id for piece in formed.pieces] == [stream_id]
        scheduler.ran(formed.pieces, 0.01)
        scheduler.answered(stream_id, 0)

    for stream_id in range(4):
        scheduler.open(stream_id)
        step(stream_id, 16, 16)
    step(0, 96, 80)  # six blocks, and three streams with one each: one of them has to go
    assert pool.held == {0: 6, 1: 1, 2: 1}
    scheduler.close(0)
    pool.release(0)
    step(3, 17, 17)
    step(1, 80, 64)
    assert pool.held == {1: 5, 2: 1, 3: 2}
    step(1, 96, 16)
    assert pool.held == {1: 6, 3: 2}
