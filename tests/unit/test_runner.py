"""The engine thread: one thread for all torch work, failures that stay where they belong, a clean end."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from outrider.engine.batch import Span
from outrider.engine.runner import Runner, Step, StepTiming, Wait
from outrider.errors import Unavailable

TIMEOUT_S = 20


class EchoModel:
    """Answers each span with one row that holds its first token."""

    info = SimpleNamespace(device="cpu")
    replayed = False

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, spans):
        self.threads.add(threading.current_thread().name)
        assert torch.is_inference_mode_enabled()
        assert self.gate.wait(TIMEOUT_S)
        if any(span.tokens[0] == 13 for span in spans):
            raise RuntimeError("unlucky")
        return torch.tensor([[float(span.tokens[0])] for span in spans])


class EchoWorker:
    """Runs each submitted (token, future) as a step of its own."""

    def __init__(self) -> None:
        self.waiting: deque = deque()
        self.wait: Wait | None = None
        self.plans = 0

    def receive(self, message) -> None:
        if message is None:
            raise ValueError("not a message")
        self.waiting.append(message)

    def plan(self):
        self.plans += 1
        if not self.waiting:
            return self.wait
        token, future = self.waiting.popleft()
        if token == -1:
            raise RuntimeError("the worker is lost")
        return Step([Span(1, [token, 0], 0, 1, [], 1, 1)], future)

    def finish(self, step, logits, timing: StepTiming) -> None:
        step.payload.set_result((logits.item(), timing))

    def fail(self, step, error) -> None:
        step.payload.set_exception(error)


@pytest.fixture
def rig():
    model, worker, fatal = EchoModel(), EchoWorker(), Future()
    runner = Runner(lambda: (model, worker), on_fatal=fatal.set_result)
    runner.start()
    runner.ready.result(TIMEOUT_S)
    yield SimpleNamespace(runner=runner, model=model, worker=worker, fatal=fatal)
    model.gate.set()
    runner.close()


def ask(rig, token: int) -> Future:
    future: Future = Future()
    rig.runner.submit((token, future))
    return future


def test_messages_become_steps_on_one_thread_in_inference_mode(rig):
    """Guards grad mode and thread pools, which belong to a thread."""
    answers = [ask(rig, token).result(TIMEOUT_S) for token in (3, 4)]
    assert [answer[0] for answer in answers] == [3.0, 4.0]
    assert rig.model.threads == {"engine"}
    assert rig.runner.call(lambda: threading.current_thread().name).result(TIMEOUT_S) == "engine"
    timing = answers[0][1]
    assert (timing.streams, timing.tokens) == (1, 2) and timing.measure() >= 0


def test_a_failed_step_fails_its_own_items_only(rig):
    """Guards against one bad step that kills the engine in silence."""
    with pytest.raises(RuntimeError, match="unlucky"):
        ask(rig, 13).result(TIMEOUT_S)
    assert ask(rig, 5).result(TIMEOUT_S)[0] == 5.0
    stats = rig.runner.call(rig.runner.stats).result(TIMEOUT_S)
    assert (stats.steps_total, stats.step_failures_total) == (1, 1)
    assert rig.runner.fatal is None


def test_a_step_is_counted_before_it_is_answered(rig):
    """Guards whoever has an answer, asks for the counters, and would not find its step in them."""
    seen, finish = [], rig.worker.finish

    def looks(*arguments) -> None:
        seen.append(rig.runner.stats().steps_total)
        finish(*arguments)

    rig.worker.finish = looks
    for token in (1, 2):
        ask(rig, token).result(TIMEOUT_S)
    assert seen == [1, 2]


def test_a_message_that_cannot_be_taken_in_is_lost_alone(rig, caplog):
    """Guards against a poisoned message that takes the service down."""
    rig.runner.submit(None)
    assert ask(rig, 5).result(TIMEOUT_S)[0] == 5.0
    assert "a message was lost" in caplog.text


def test_a_lost_worker_stops_the_engine_loudly(rig):
    """Guards against a dead engine behind a service that still accepts work."""
    rig.model.gate.clear()
    ask(rig, 1)
    ask(rig, -1)
    pending = rig.runner.call(lambda: None)
    late = None
    rig.model.gate.set()
    error = rig.fatal.result(TIMEOUT_S)
    assert "the worker is lost" in str(error) and rig.runner.fatal is error
    with pytest.raises(Unavailable, match="the worker is lost"):
        rig.runner.submit((1, late))
    with pytest.raises(Unavailable, match="the worker is lost"):
        rig.runner.call(lambda: None)
    assert pending.done()


def test_calls_left_behind_by_a_stop_are_answered(rig):
    """Guards against a caller that waits for ever on an engine that has stopped."""
    started, go = threading.Event(), threading.Event()

    def die() -> None:
        started.set()
        go.wait(TIMEOUT_S)
        raise SystemExit

    # A SystemExit in a call is the caller's; it must not end the engine either.
    rude = rig.runner.call(die)
    started.wait(TIMEOUT_S)
    ask(rig, -1)
    go.set()
    rig.fatal.result(TIMEOUT_S)
    with pytest.raises(SystemExit):
        rude.result(TIMEOUT_S)


def test_a_failed_load_is_reported_by_ready():
    """Guards against a service that waits for ever for a model that cannot be had."""
    fatal: Future = Future()

    def build():
        raise OSError("no such model")

    runner = Runner(build, on_fatal=fatal.set_result)
    runner.start()
    with pytest.raises(OSError, match="no such model"):
        runner.ready.result(TIMEOUT_S)
    runner.close()
    assert not fatal.done()
    with pytest.raises(Unavailable):
        runner.submit(1)


def test_a_waiter_that_gives_up_does_not_break_the_start():
    """Guards against `ready` being cancelled by a waiter, which would end the thread."""
    gate = threading.Event()
    model, worker = EchoModel(), EchoWorker()

    def build():
        gate.wait(TIMEOUT_S)
        return model, worker

    runner = Runner(build)
    runner.start()
    assert not runner.ready.cancel()
    gate.set()
    runner.ready.result(TIMEOUT_S)
    runner.close()


def test_what_a_call_raises_goes_to_its_caller(rig):
    """Guards the engine against errors of those who only ask."""

    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        rig.runner.call(fail).result(TIMEOUT_S)
    assert ask(rig, 5).result(TIMEOUT_S)[0] == 5.0


def test_a_message_ends_a_wait(rig):
    """Guards against a step that waits out its time although the streams it waits for are there."""
    rig.runner.call(lambda: setattr(rig.worker, "wait", Wait(3600.0))).result(TIMEOUT_S)
    assert ask(rig, 5).result(TIMEOUT_S)[0] == 5.0


def test_a_wait_ends_by_itself(rig):
    """Guards against an engine that sleeps until the next message although the worker asked for a time."""
    planned = threading.Event()

    def wait_once() -> None:
        rig.worker.wait = Wait(0.01)
        plans = rig.worker.plans

        def plan():
            rig.worker.plans += 1
            if rig.worker.plans > plans + 2:
                planned.set()
                return None
            return Wait(0.01)

        rig.worker.plan = plan

    rig.runner.call(wait_once).result(TIMEOUT_S)
    assert planned.wait(TIMEOUT_S)


def test_an_idle_engine_does_not_spin(rig):
    """Guards the core that an idle service would burn."""
    ask(rig, 5).result(TIMEOUT_S)
    before = rig.runner.call(lambda: rig.worker.plans).result(TIMEOUT_S)
    after = rig.runner.call(lambda: rig.worker.plans).result(TIMEOUT_S)
    assert after <= before + 2


def test_closing_finishes_what_was_taken(rig):
    """Guards requests in flight when a service is told to stop."""
    rig.model.gate.clear()
    answers = [ask(rig, token) for token in (1, 2, 3)]
    closer = threading.Thread(target=rig.runner.close, args=(TIMEOUT_S,))
    closer.start()
    rig.model.gate.set()
    assert [answer.result(TIMEOUT_S)[0] for answer in answers] == [1.0, 2.0, 3.0]
    closer.join(TIMEOUT_S)
    with pytest.raises(Unavailable, match=r"closing|stopped"):
        rig.runner.submit((4, Future()))


def test_closing_without_time_to_drain_stops_between_steps(rig):
    """Guards against a stop that waits for ever for work that never ends."""
    rig.runner.call(lambda: setattr(rig.worker, "wait", Wait(3600.0))).result(TIMEOUT_S)
    rig.runner.close(drain_s=0.0)
    assert not any(thread.name == "engine" and thread.is_alive() for thread in [rig.runner._thread])


def test_a_long_step_shows_as_running_and_not_as_stuck(rig):
    """Guards health checks: the age of the last step alone cannot tell a long step from a dead engine."""
    assert rig.runner.stats().last_step_age_s is None
    ask(rig, 1).result(TIMEOUT_S)
    rig.runner.call(lambda: None).result(TIMEOUT_S)
    idle = rig.runner.stats()
    assert idle.step_running_s is None and idle.last_step_age_s is not None
    rig.model.gate.clear()
    rig.model.replayed = True
    answer, entered = ask(rig, 2), threading.Event()
    while rig.runner.stats().step_running_s is None:
        entered.wait(0.001)
    rig.model.gate.set()
    answer.result(TIMEOUT_S)
    stats = rig.runner.call(rig.runner.stats).result(TIMEOUT_S)
    assert (stats.steps_total, stats.step_streams_total, stats.step_tokens_total) == (2, 2, 4)
    assert stats.steps_replayed_total == 1


def test_a_long_step_is_not_taken_for_one_that_hangs(rig, monkeypatch: pytest.MonkeyPatch):
    """Guards prompts on slow machines: whoever is told that the engine hangs sends them elsewhere, from the start."""
    rig.model.gate.clear()
    answer, entered = ask(rig, 2), threading.Event()
    while rig.runner.stats().step_running_s is None:
        entered.wait(0.001)
    monkeypatch.setattr("outrider.engine.step_meter.STUCK_AFTER_S", 0.0)
    assert not rig.runner.is_stuck
    monkeypatch.setattr("outrider.engine.step_meter.STUCK_TOKEN_S", 0.0)
    assert rig.runner.is_stuck
    rig.model.gate.set()
    answer.result(TIMEOUT_S)
    rig.runner.call(lambda: None).result(TIMEOUT_S)
    assert not rig.runner.is_stuck


def test_idle_work_gives_way_to_messages_and_ends(monkeypatch: pytest.MonkeyPatch):
    """Measuring what steps cost must not delay a step by more than one pass, nor keep the thread awake when done."""
    monkeypatch.setattr("outrider.engine.idle_work.IDLE_AFTER_S", 0.0)

    class Work:
        steps, pauses, done = 0, 0, threading.Event()

        def step(self) -> float | None:
            self.steps += 1
            if self.steps < 200:
                return 0.001
            self.done.set()
            return None

        def pause(self) -> None:
            self.pauses += 1

    work, worker = Work(), EchoWorker()
    runner: Runner = Runner(lambda: (runner.when_idle(work), (EchoModel(), worker))[1])
    runner.start()
    runner.ready.result(TIMEOUT_S)
    future: Future = Future()
    runner.submit((7, future))
    assert future.result(TIMEOUT_S)[0] == 7
    assert work.pauses > 0
    assert work.done.wait(TIMEOUT_S)
    runner.close()
    assert work.steps == 200
