"""Runner: the one thread of a service that touches its model.

Grad mode, the OpenMP pool and the CUDA context belong to a thread, so loading, probing, warm-up and serving all happen
in this one. Others hand in messages and functions; what to run next is the worker's business.

    any thread                      engine thread
    submit(message) --> inbox --> worker.receive
    call(function)  --> inbox --> function() --> future
                                  worker.plan --> Step --> model.forward --> worker.finish
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from outrider.engine.idle_work import Idler, IdleWork
from outrider.engine.step_meter import RunnerStats, StepMeter
from outrider.engine.stopwatch import Stopwatch
from outrider.engine.worker import M, P, Step, StepTiming, Wait, Worker
from outrider.errors import Unavailable

if TYPE_CHECKING:
    from outrider.engine.model import Model

__all__ = ["Runner", "RunnerStats", "Step", "StepTiming", "Wait", "Worker"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Call(NamedTuple):
    function: Callable[[], Any]
    future: Future[Any]


class _Close(NamedTuple):
    give_up: float
    """Monotonic time at which draining ends."""


class Runner(Generic[M, P]):
    """Runs a worker's steps on its model, in a thread of its own.

    Args:
        build: loads the model (which sets the thread's torch threads) and makes the worker; runs in the engine thread.
        on_fatal: called in the engine thread when the engine stops for good after it was ready. A failed `build` is
            reported by `ready` alone.
    """

    def __init__(
        self,
        build: Callable[[], tuple[Model, Worker[M, P]]],
        *,
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.ready: Future[None] = Future()
        self.ready.set_running_or_notify_cancel()  # From here on a waiter that gives up cannot cancel it.
        self.fatal: BaseException | None = None
        self._build = build
        self._on_fatal = on_fatal
        self._inbox: queue.SimpleQueue[M | _Call | _Close] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._refusal: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._meter = StepMeter()
        self._idler = Idler()
        self._give_up: float | None = None

    def when_idle(self, work: IdleWork) -> None:
        """Has work done in the engine thread while there is nothing else to do; called in `build`."""
        self._idler.work = work

    def start(self) -> None:
        """Starts the thread; `ready` resolves when the model is loaded, or holds the reason why it is not."""
        self._thread.start()

    def submit(self, message: M) -> None:
        """Hands a message to the worker; thread-safe.

        Raises:
            Unavailable: the engine is closing or has stopped.
        """
        self._put(message)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function in the engine thread between two steps; thread-safe.

        Raises:
            Unavailable: the engine is closing or has stopped.
        """
        future: Future[T] = Future()
        self._put(_Call(function, future))
        return future

    def close(self, drain_s: float = 0.0) -> None:
        """Takes nothing new, lets the worker finish its work for up to `drain_s` seconds, and joins the thread."""
        with self._gate:
            closing = self._refusal is not None
            self._refusal = self._refusal or "the engine is closing"
        if not closing:
            self._inbox.put(_Close(time.monotonic() + drain_s))
        if self._thread.is_alive():
            self._thread.join()

    def stats(self) -> RunnerStats:
        """Counters and ages; thread-safe."""
        return self._meter.stats()

    @property
    def is_stuck(self) -> bool:
        """Whether the step in progress hangs; thread-safe."""
        return self._meter.is_stuck

    def _put(self, entry: M | _Call) -> None:
        with self._gate:
            if self._refusal is not None:
                raise Unavailable(self._refusal)
            self._inbox.put(entry)

    def _run(self) -> None:
        with torch.inference_mode():
            try:
                model, worker = self._build()
            except BaseException as error:
                self._stop(error)
                self.ready.set_exception(error)
                return
            # What was loaded stays for good; a collection must not walk through it in the middle of a step.
            gc.collect()
            gc.freeze()
            self.ready.set_result(None)
            try:
                self._serve(model, worker)
            except BaseException as error:
                log.critical("the engine stops: %s", error, exc_info=error)
                self._stop(error)
                if self._on_fatal is not None:
                    self._on_fatal(error)
            else:
                self._stop(None)

    def _serve(self, model: Model, worker: Worker[M, P]) -> None:
        wait_s: float | None = 0.0
        self._idler.begin()
        try:
            while True:
                self._drain_inbox(worker, wait_s)
                if self._give_up is not None and time.monotonic() >= self._give_up:
                    return
                plan = worker.plan()
                if isinstance(plan, Step):
                    self._idler.busy()
                    self._step(model, worker, plan)
                    wait_s = 0.0
                elif isinstance(plan, Wait):
                    self._idler.busy()
                    wait_s = max(plan.seconds, 0.0)
                elif self._give_up is not None:
                    return
                else:
                    wait_s = self._idler.idle()
        finally:
            self._idler.busy()

    def _drain_inbox(self, worker: Worker[M, P], wait_s: float | None) -> None:
        """Takes in all that is there; waits up to `wait_s` (None: for ever) for the first entry."""
        if wait_s is not None and self._give_up is not None:
            wait_s = min(wait_s, max(self._give_up - time.monotonic(), 0.0))
        try:
            entry = self._inbox.get(timeout=wait_s) if wait_s != 0.0 else self._inbox.get_nowait()
            while True:
                self._take(worker, entry)
                entry = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, worker: Worker[M, P], entry: M | _Call | _Close) -> None:
        if isinstance(entry, _Close):
            self._give_up = entry.give_up
        elif isinstance(entry, _Call):
            _answer(entry)
        else:
            try:
                worker.receive(entry)
            except Exception:
                log.exception("a message was lost")

    def _step(self, model: Model, worker: Worker[M, P], step: Step[P]) -> None:
        tokens = sum(len(span.tokens) for span in step.spans)
        started = self._meter.begin(tokens)
        watch = Stopwatch(model.info.device)
        try:
            if step.copies:
                model.copy_kv(step.copies)
            logits = model.forward(step.spans)
            # Nobody waits for the device here: what a worker has to do on the host it does meanwhile.
            timing = StepTiming(started, watch.stop(logits), len(step.spans), tokens)
            # Counted before anybody is answered: who has the answer and asks for the counters finds it in them.
            self._meter.count(len(step.spans), tokens, replayed=model.replayed)
            worker.finish(step, logits, timing)
        except Exception as error:
            self._meter.count_failure()
            log.exception("a step of %d streams failed", len(step.spans))
            worker.fail(step, error)
            if isinstance(error, torch.AcceleratorError):
                raise  # The device's context is lost: every further step would fail.
        finally:
            self._meter.end()

    def _stop(self, error: BaseException | None) -> None:
        """Refuses what comes and what still waits."""
        with self._gate:
            self.fatal = error
            self._refusal = "the engine has stopped" if error is None else f"the engine has stopped: {error}"
        while True:
            try:
                entry = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(entry, _Call) and entry.future.set_running_or_notify_cancel():
                entry.future.set_exception(Unavailable(self._refusal))


def _answer(call: _Call) -> None:
    if not call.future.set_running_or_notify_cancel():
        return
    try:
        call.future.set_result(call.function())
    except BaseException as error:
        call.future.set_exception(error)
