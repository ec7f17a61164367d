"""Step formation, by discrete-event simulation on a simulated clock: no threads, no sleeping, no machine speed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from outrider.engine.formation import Formation, Piece, Work
from outrider.engine.pace import ReturnTime, StepTime
from outrider.engine.scheduler import Scheduler


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Blocks:
    """A pool of blocks of `size` tokens, with the scheduler's three verbs."""

    def __init__(self, blocks: int, size: int = 16) -> None:
        self.total = blocks
        self.size = size
        self.held: dict[int, int] = {}

    def fits(self, *tokens: int) -> bool:
        return sum(-(-one // self.size) for one in tokens) <= self.total

    def admit(self, stream_id: int, work: Work, spare_blocks: int) -> int | None:
        return 0 if self.grow(stream_id, work.tokens, spare_blocks) else None

    def grow(self, stream_id: int, tokens: int, spare_blocks: int) -> bool:
        more = -(-tokens // self.size) - self.held.get(stream_id, 0)
        if more > 0:
            if self.total - sum(self.held.values()) - more < spare_blocks:
                return False
            self.held[stream_id] = self.held.get(stream_id, 0) + more
        return True

    def release(self, stream_id: int) -> None:
        self.held.pop(stream_id, None)


def tenfold_stub_s(rows: int) -> float:
    """The stub pair's target step: 100 ms up to 16 rows, then 5 ms a row."""
    return 0.1 + 0.005 * max(0, rows - 16)


class Simulation:
    """B streams in a closed loop: a verify of gamma slots, `return_s` later the next one; gamma 0 returns at once."""

    def __init__(
        self,
        streams: int,
        gamma: int,
        *,
        wait: bool = True,
        return_s: Callable[[], float] | None = None,
        idle: tuple[int, ...] = (),
    ) -> None:
        self.clock = Clock()
        self.scheduler = Scheduler(Blocks(10_000), max_num_seqs=64, max_num_batched_tokens=2048, clock=self.clock)
        self.gamma = gamma
        self.wait = wait
        self.return_s = return_s or (lambda: 0.010 * gamma + 0.001)
        self.idle = idle
        self.steps: list[int] = []
        self.length: dict[int, int] = {}
        self._events: list[tuple[float, int]] = []
        for stream_id in range(streams):
            heapq.heappush(self._events, (0.005 * stream_id, stream_id))

    def run(self, steps: int) -> list[int]:
        """Streams in each of the first `steps` steps."""
        while len(self.steps) < steps:
            self._deliver(self.clock.now)
            formation = self.scheduler.form()
            if not formation.pieces:
                until = self._events[0][0] if self._events else float("inf")
                if formation.wait_s is not None and self.wait:
                    until = min(until, self.clock.now + formation.wait_s)
                assert until < float("inf"), "nothing will ever happen again"
                self.clock.now = max(until, self.clock.now)
                continue
            self._step(formation)
        return self.steps

    def _deliver(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            arrived_s, stream_id = heapq.heappop(self._events)
            first = stream_id not in self.length
            if first:
                self.scheduler.open(stream_id)
                self.length[stream_id] = 12
            rows = (self.length[stream_id] if first else 1) + self.gamma
            self.scheduler.submit(
                stream_id, Work(self.length[stream_id] + self.gamma, rows, self.gamma + 1), arrived_s=arrived_s
            )

    def _step(self, formation: Formation) -> None:
        rows = sum(piece.rows for piece in formation.pieces)
        seconds = tenfold_stub_s(len(formation.pieces) * (self.gamma + 1))
        self.clock.now += seconds
        self.scheduler.ran(formation.pieces, seconds)
        self.steps.append(len(formation.pieces))
        assert rows <= 2048
        for stream_id, _, last in formation.pieces:
            if not last:
                continue
            self.length[stream_id] += self.gamma + 1
            if self.gamma == 0:
                self.scheduler.submit(stream_id, Work(self.length[stream_id], 1, 1), arrived_s=self.clock.now)
                continue
            self.scheduler.answered(stream_id, self.gamma)
            if stream_id not in self.idle or self.length[stream_id] < 100:
                heapq.heappush(self._events, (self.clock.now + self.return_s(), stream_id))


@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("streams", [8, 16])
def test_staggered_streams_ride_together(streams: int, gamma: int) -> None:
    """Guards against two cohorts for ever: 0.50-0.55 of the speed where each step takes whatever is ready."""
    steps = Simulation(streams, gamma).run(60)
    assert sum(steps) / len(steps) >= 0.95 * streams


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("streams", [8, 16])
def test_jitter_does_not_split_the_batch(streams: int, gamma: int) -> None:
    """Guards against a margin so thin that ordinary jitter of the return time breaks streams off for good."""
    draw = random.Random(7)
    steps = Simulation(streams, gamma, return_s=lambda: 0.010 * gamma * draw.uniform(0.9, 1.1) + 0.001).run(60)
    assert sum(steps) / len(steps) >= 0.95 * streams


def test_without_waiting_the_streams_split() -> None:
    """The planted error: had waiting no effect, the test above would pass for the wrong reason."""

    class Eager(Scheduler):
        def _worth_waiting(self, coming: object, ready_tails: list[int]) -> float:
            return 0.0

    simulation = Simulation(8, 4)
    simulation.scheduler = Eager(Blocks(10_000), max_num_seqs=64, max_num_batched_tokens=2048, clock=simulation.clock)
    steps = simulation.run(60)
    assert sum(steps) / len(steps) < 0.8 * 8


def test_streams_gone_idle_hold_nobody_up() -> None:
    """Guards against waiting for a stream that will not come: three of eight fall silent, the rest keep their pace."""
    simulation = Simulation(8, 4, idle=(1, 4, 6))
    simulation.run(40)
    before = simulation.clock.now
    simulation.run(60)
    per_step = (simulation.clock.now - before) / 20
    assert simulation.steps[-20:] == [5] * 20
    assert per_step == pytest.approx(tenfold_stub_s(25) + 0.041, rel=0.02)


def test_a_step_starts_at_once_when_nothing_is_on_its_way() -> None:
    """Guards against a delay at batch 1."""
    simulation = Simulation(1, 4)
    simulation.run(20)
    assert simulation.clock.now == pytest.approx(20 * 0.1 + 19 * 0.041, rel=1e-6)


def ready_scheduler(
    blocks: int = 1000, *, max_num_seqs: int = 64, max_num_batched_tokens: int = 64, streams: int = 0
) -> Scheduler:
    scheduler = Scheduler(
        Blocks(blocks), max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, clock=Clock()
    )
    for stream_id in range(streams):
        scheduler.open(stream_id)
    return scheduler


def test_oldest_item_first_when_seats_are_short() -> None:
    """Guards against starvation: with two seats, four streams in a closed loop take turns."""
    scheduler = ready_scheduler(max_num_seqs=2, streams=4)
    for stream_id in range(4):
        scheduler.submit(stream_id, Work(8, 1, 1), arrived_s=0.0)
    rode: list[int] = []
    for _ in range(6):
        pieces = scheduler.form().pieces
        scheduler.ran(pieces, 0.1)
        for stream_id, _, _ in pieces:
            rode.append(stream_id)
            scheduler.submit(stream_id, Work(8, 1, 1), arrived_s=0.0)
    assert rode == [0, 1, 2, 3] * 3


def test_a_long_prompt_is_fed_in_pieces_beside_decoding_streams() -> None:
    """Guards against a prompt longer than the budget that never fits, and against one that stops the others."""
    scheduler = ready_scheduler(max_num_batched_tokens=64, streams=2)
    scheduler.submit(0, Work(204, 204, 5), arrived_s=0.0)
    pieces_of_prompt: list[Piece] = []
    while not pieces_of_prompt or not pieces_of_prompt[-1].last:
        scheduler.submit(1, Work(8, 5, 5), arrived_s=0.0)
        pieces = {piece.stream_id: piece for piece in scheduler.form().pieces}
        assert pieces[1] == Piece(1, 5, True)
        pieces_of_prompt.append(pieces[0])
        scheduler.ran(pieces.values(), 0.1)
    assert sum(piece.rows for piece in pieces_of_prompt) == 204
    assert pieces_of_prompt[-1].rows >= 5
    assert max(piece.rows for piece in pieces_of_prompt) <= 32


def test_an_item_larger_than_the_pool_is_refused() -> None:
    """Guards against an item that waits for ever: the pool's three blocks hold 48 tokens."""
    scheduler = ready_scheduler(blocks=3, streams=2)
    scheduler.submit(0, Work(49, 49, 1), arrived_s=0.0)
    scheduler.submit(1, Work(48, 48, 1), arrived_s=0.0)
    formation = scheduler.form()
    assert formation.refused == (0,)
    assert [piece.stream_id for piece in formation.pieces] == [1]


def test_a_new_stream_waits_for_room_and_costs_nobody_their_blocks() -> None:
    """Guards against admission by preemption, which lets two long prompts throw each other out for ever."""
    scheduler = ready_scheduler(blocks=4, streams=2)
    scheduler.submit(0, Work(40, 40, 1), arrived_s=0.0)
    scheduler.ran(scheduler.form().pieces, 0.1)
    scheduler.answered(0, 0)
    scheduler.submit(1, Work(40, 40, 1), arrived_s=0.0)
    assert scheduler.form() == Formation()
    scheduler._seating._pool.release(0)
    scheduler.close(0)
    assert [piece.stream_id for piece in scheduler.form().pieces] == [1]


def test_asking_again_costs_no_place_in_the_queue_for_room() -> None:
    """Guards against starvation of a long prompt whose coordinator asks again while it waits."""
    scheduler = ready_scheduler(blocks=4, streams=3)
    scheduler.submit(0, Work(40, 40, 1), arrived_s=0.0)
    scheduler.ran(scheduler.form().pieces, 0.1)
    scheduler.answered(0, 0)
    scheduler.submit(1, Work(40, 40, 1), arrived_s=0.0)
    scheduler.submit(2, Work(40, 40, 1), arrived_s=0.0)
    scheduler.withdraw(1)
    scheduler.submit(1, Work(40, 40, 1), arrived_s=0.0)
    scheduler._seating._pool.release(0)
    scheduler.close(0)
    assert [piece.stream_id for piece in scheduler.form().pieces] == [1]


def test_the_youngest_stream_yields_when_the_pool_is_full() -> None:
    """Guards against a deadlock of running streams that all need one more block."""
    scheduler = ready_scheduler(blocks=5, streams=2)
    for stream_id in range(2):
        scheduler.submit(stream_id, Work(30, 30, 1), arrived_s=0.0)
    scheduler.ran(scheduler.form().pieces, 0.1)
    scheduler.submit(1, Work(48, 5, 5), arrived_s=0.0)
    assert [piece.stream_id for piece in scheduler.form().pieces] == [1]
    scheduler.answered(1, 4)
    scheduler.submit(0, Work(33, 3, 3), arrived_s=0.0)
    formation = scheduler.form()
    assert [piece.stream_id for piece in formation.pieces] == [0]
    assert scheduler.preemptions == 1


def test_a_preempted_item_is_computed_from_the_start() -> None:
    """Guards against an item that nobody answers when its stream, the youngest, loses its blocks."""
    scheduler = ready_scheduler(blocks=5, streams=2)
    for stream_id in range(2):
        scheduler.submit(stream_id, Work(20, 20, 1), arrived_s=0.0)
    scheduler.ran(scheduler.form().pieces, 0.1)
    scheduler.submit(0, Work(33, 3, 3), arrived_s=0.0)
    scheduler.submit(1, Work(33, 3, 3), arrived_s=0.0)
    assert [piece.stream_id for piece in scheduler.form().pieces] == [0]
    scheduler._seating._pool.release(0)
    scheduler.close(0)
    assert scheduler.form().pieces == (Piece(1, 33, True),)


@pytest.mark.parametrize(("streams", "blocks"), [(4, 12), (8, 12), (6, 16)])
def test_every_stream_finishes_and_none_gives_way_twice(streams: int, blocks: int) -> None:
    """Guards against livelock in a pool for two and a half streams, and against streams that throw each other out."""
    scheduler = ready_scheduler(blocks=blocks, max_num_batched_tokens=256)
    pool = scheduler._seating._pool
    length = dict.fromkeys(range(streams), 20)
    evictions = dict.fromkeys(length, 0)
    release = pool.release

    def evict(stream_id: int) -> None:
        evictions[stream_id] += 1
        release(stream_id)

    pool.release = evict
    for stream_id in length:
        scheduler.open(stream_id)
    outstanding: set[int] = set()
    for _ in range(2000):
        for stream_id, tokens in length.items():
            if stream_id not in outstanding and tokens < 80:
                rows = tokens if stream_id not in pool.held else 1
                scheduler.submit(stream_id, Work(tokens + 4, rows + 4, 5, 84), arrived_s=0.0)
                outstanding.add(stream_id)
        formation = scheduler.form()
        scheduler.ran(formation.pieces, 0.1)
        for stream_id, _, last in formation.pieces:
            if last:
                scheduler.answered(stream_id, 4)
                outstanding.discard(stream_id)
                length[stream_id] += 2
                if length[stream_id] >= 80:
                    release(stream_id)
                    scheduler.close(stream_id)
        if min(length.values()) >= 80:
            break
    assert min(length.values()) >= 80
    assert scheduler.preemptions == sum(evictions.values()) > 0
    assert max(evictions.values()) == 1


def test_step_time_is_constant_below_and_linear_between_what_was_seen() -> None:
    """Guards the fit: noise cannot make a larger step cheaper, and nothing is known before the first step."""
    cost = StepTime()
    assert cost.predict(5) == 0.0
    cost.observe(8, 0.10)
    assert cost.predict(1) == cost.predict(8) == 0.10
    assert cost.predict(16) == pytest.approx(0.10)
    cost.observe(40, 0.22)
    assert cost.predict(24) == pytest.approx(0.16)
    assert cost.predict(80) == pytest.approx(0.37)
    cost.observe(64, 0.20)
    assert cost.predict(64) == pytest.approx(0.22)


def test_one_idle_stream_does_not_spoil_the_return_time() -> None:
    """Guards against a pause of the client that makes the target wait for it ever after."""
    returns = ReturnTime()
    assert returns.expect(4) is None
    for _ in range(20):
        returns.observe(4, 0.040)
    returns.observe(4, 30.0)
    expected = returns.expect(4)
    assert expected is not None and expected.mean_s < 0.05
    returns.observe(0, 20.0)
    returns.observe(0, 0.010)
    again = returns.expect(0)
    assert again is not None and again.mean_s == pytest.approx(0.010)
