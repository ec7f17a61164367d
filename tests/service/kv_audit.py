"""KVAudit: whether both services' KV accounts are right, looked at before and after every step of an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outrider.engine.block_manager import BlockManager
from outrider.engine.runner import Runner
from outrider.engine.streams import Streams


class KVAudit:
    """What was seen of the engines that ran within `running`, those of services started anew included.

    Attributes:
        checks: how often accounts were looked at, by the kind of worker.
        preemptions: of all targets.
        evictions: of all drafts with a model.
        faults: what was wrong, each kind once.
    """

    def __init__(self) -> None:
        self.checks: Counter[str] = Counter()
        self.faults: dict[str, None] = {}
        self._workers: list[Any] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Engines that start within are audited for as long as they live."""
        serve = Runner._serve

        def audited(runner: Runner[Any, Any], model: Any, worker: Any) -> None:
            if streams_of(worker) is not None:  # a draft that looks up holds no KV
                self._workers.append(worker)
                worker = _Audited(worker, self)
            serve(runner, model, worker)

        Runner._serve = audited  # type: ignore[method-assign]
        try:
            yield
        finally:
            Runner._serve = serve  # type: ignore[method-assign]

    @property
    def preemptions(self) -> int:
        return sum(worker.scheduler.preemptions for worker in self._workers if hasattr(worker, "scheduler"))

    @property
    def evictions(self) -> int:
        return sum(worker.room.evictions for worker in self._workers if hasattr(worker, "room"))

    def check(self, worker: Any) -> None:
        """Looks at one worker's accounts; called in its engine thread."""
        self.checks[type(worker).__name__] += 1
        streams = streams_of(worker)
        assert streams is not None
        try:
            streams.check_integrity()
        except RuntimeError as error:
            self.faults.setdefault(f"{type(worker).__name__}: {error}")

    def pools(self) -> list[tuple[str, int, int]]:
        """Of the workers that serve now or served last: kind, free blocks, all blocks."""
        latest = {type(worker).__name__: worker for worker in self._workers}
        return [(kind, pool_of(worker).free_blocks, pool_of(worker).num_blocks) for kind, worker in latest.items()]


class _Audited:
    """A worker whose accounts are checked after everything that may change them."""

    def __init__(self, worker: Any, audit: KVAudit) -> None:
        self._worker = worker
        self._audit = audit
        self.receive = self._checked(worker.receive)
        self.plan = self._checked(worker.plan)
        self.finish = self._checked(worker.finish)
        self.fail = self._checked(worker.fail)

    def _checked(self, method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            finally:
                self._audit.check(self._worker)

        return call


def streams_of(worker: Any) -> Streams | None:
    """The streams of a verifier or a proposer with KV; None for other workers."""
    found = (getattr(worker, name, None) for name in ("streams", "_streams"))
    return next((streams for streams in found if isinstance(streams, Streams)), None)


def pool_of(worker: Any) -> BlockManager:
    """The pool behind them."""
    streams = streams_of(worker)
    assert streams is not None
    return streams._block_manager
