"""Profiler: measures what a model's steps cost, on the serving path, while there is nothing else to do.

It runs in the engine thread, one pass at a time, so real work waits for one pass at the most. Services that share a
device take turns: each shape is measured under a lock that the device's name gives. A profile is kept on disk under
everything that it depends on, and used at once by the next process for which all of that is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout

from outrider.costs import CostProfile, StepCost
from outrider.engine.block_manager import BlockManager
from outrider.engine.draws import inverse_cdf
from outrider.engine.edits import RowContext
from outrider.engine.info import ModelInfo
from outrider.engine.logits import process
from outrider.engine.model import Model
from outrider.engine.profile_shapes import Bounds, Shape, shapes
from outrider.engine.profile_store import load_profile, profile_key, store_profile
from outrider.engine.span import Span
from outrider.errors import OutriderError
from outrider.sampling import SamplingParams

log = logging.getLogger(__name__)

REPEATS = 5
LEAST_SHAPES = 6
"""Fewer make no profile, unless there are no more: a machine that is too busy now is not to be judged for good."""
LONGEST_PASS_S = 0.5
"""Shapes that would take longer than this are left to the fit: a request that arrives meanwhile waits for it."""
_PLAIN = SamplingParams(temperature=1.0)
TURN_S = 0.2
"""Seconds until a device that another service is measuring on is asked for again."""


class Profiler:
    """Measures shape after shape. Used in the engine thread only; `profile` may be read from anywhere.

    Args:
        model: whose steps are measured.
        blocks: of its KV; borrowed for a pass and given back.
        bounds: of the service.
        seconds: to spend in passes at most; 0 measures nothing, but a kept profile is still used.
        folder: where profiles and the devices' locks lie.
        threads: torch threads of this thread.

    Attributes:
        profile: None until it is complete.
        state: "cached", "measuring", "measured" or "off".
    """

    def __init__(
        self,
        model: Model,
        blocks: BlockManager,
        bounds: Bounds,
        *,
        seconds: float,
        folder: Path,
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._seconds = seconds
        self._folder = folder
        self._clock = clock
        self._key = profile_key(model.info, threads)
        self._device_lock = folder / f"{_device(model.info)}.lock"
        self.profile = load_profile(folder, self._key)
        self.state = "cached" if self.profile is not None else "measuring" if seconds > 0 else "off"
        self._shapes = shapes(bounds, model.info, blocks.num_blocks)
        self._wanted = len(self._shapes)
        self._enough = min(LEAST_SHAPES, self._wanted)
        self._steps: list[StepCost] = []
        self._samples: list[tuple[float, float]] = []
        self._spent_s = 0.0
        self._slowest: Shape | None = None
        self._lock: FileLock | None = None

    def step(self) -> float | None:
        """Runs one pass; returns seconds until it wants to run the next one, or None when there is nothing left."""
        if self.state != "measuring":
            return None
        shape = self._next_shape()
        if shape is None or self._spent_s >= self._seconds:
            self._finish()
            return None
        if not self._take_turn():
            return TURN_S
        began = self._clock()
        try:
            sample = self._pass(shape)
        except (OutriderError, torch.OutOfMemoryError) as error:
            log.info("steps of %s are not measured: %s", shape, error)
            self._done(shape)
            return 0.0
        finally:
            self._spent_s += self._clock() - began
        # The first pass of a shape pays for what the others find in place.
        self._samples.append(sample)
        if sum(sample) > LONGEST_PASS_S:
            self._slowest = shape
        if len(self._samples) > REPEATS or self._slowest is shape:
            kept = self._samples[1:] or self._samples
            forward_s, sample_s = (statistics.median(times) for times in zip(*kept, strict=True))
            self._steps.append(StepCost(*shape, forward_s, sample_s))
            self._done(shape)
        return 0.0

    def pause(self) -> None:
        """Real work has come: lets the other services of the device go on measuring."""
        self._end_turn()

    def close(self) -> None:
        """The engine ends."""
        self._end_turn()

    def _next_shape(self) -> Shape | None:
        """The next one that is not slower than what has already proved too slow."""
        while self._shapes:
            shape = self._shapes[0]
            slow = self._slowest
            if slow is None or not (
                shape.streams >= slow.streams and shape.tokens >= slow.tokens and shape.context >= slow.context
            ):
                return shape
            self._shapes.pop(0)
        return None

    def _done(self, shape: Shape) -> None:
        self._shapes.remove(shape)
        self._samples.clear()
        self._end_turn()

    def _finish(self) -> None:
        self._end_turn()
        if len(self._steps) < self._enough:
            # A flat line through one or two points would promise that rows are free.
            self.state = "off"
            log.warning(
                "%d of %d shapes could be measured in %.1f s, too few to plan from: costs are learnt from requests",
                len(self._steps),
                self._wanted,
                self._spent_s,
            )
            return
        self.profile = CostProfile(tuple(self._steps), seconds=round(self._spent_s, 3))
        self.state = "measured"
        store_profile(self._folder, self._key, self.profile)
        fit = self.profile.fit
        log.info(
            "measured %d shapes in %.1f s: a step takes %.2f ms + %.4f ms per row + %.3f us per cached token",
            len(self._steps),
            self._spent_s,
            1e3 * fit.fixed_s,
            1e3 * fit.row_s,
            1e6 * fit.context_s,
        )

    def _pass(self, shape: Shape) -> tuple[float, float]:
        """Seconds in the model, and in drawing from all its rows."""
        info = self._model.info
        with self._tables(shape) as tables:
            tokens = [1 + index % (info.vocab_rows - 1) for index in range(shape.tokens)]
            spans = [
                Span(index, tokens, shape.context, shape.tokens, table, 1, shape.context + 1)
                for index, table in enumerate(tables)
            ]
            began = self._clock()
            logits = self._model.forward(spans)
            if logits.is_cuda:
                torch.cuda.current_stream(logits.device).synchronize()
            middle = self._clock()
        rows = [RowContext(_PLAIN, tokens, 1, 1)] * len(logits)
        p = process(logits, rows).p
        inverse_cdf(p, np.full(len(logits), 0.5))
        return middle - began, self._clock() - middle

    @contextlib.contextmanager
    def _tables(self, shape: Shape) -> Iterator[list[list[int]]]:
        """KV blocks for the streams of a pass.

        Raises:
            OutOfBlocks: others hold too many now.
        """
        tables: list[list[int]] = []
        try:
            for _ in range(shape.streams):
                tables.append([])
                self._blocks.grow(tables[-1], shape.context + shape.tokens)
            yield tables
        finally:
            for table in tables:
                self._blocks.release(table)

    def _take_turn(self) -> bool:
        if self._lock is not None:
            return True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._device_lock, thread_local=False)
            lock.acquire(blocking=False)
        except Timeout:
            return False
        except OSError as error:
            log.debug("measuring without a lock: %s", error)
            return True
        self._lock = lock
        return True

    def _end_turn(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _device(info: ModelInfo) -> str:
    return hashlib.sha256((info.device_uuid or info.device).encode()).hexdigest()[:16]
