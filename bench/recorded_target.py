"""A target service in a process of its own that notes every step, and runs the same steps again in a bare loop."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

from outrider.engine.blas import pin_blas

pin_blas()

from outrider.engine.model import Model  # noqa: E402 (the BLAS is pinned before torch is imported)
from outrider.engine.span import Span  # noqa: E402
from outrider.sampling import SamplingParams  # noqa: E402
from outrider.seam import StreamOpen  # noqa: E402
from outrider.service.launch import located  # noqa: E402
from target_service.config import parse  # noqa: E402
from target_service.proposal import PLAIN  # noqa: E402
from target_service.round import Round  # noqa: E402
from target_service.scoring import judge  # noqa: E402
from target_service.service import TargetService  # noqa: E402

BEGIN, REPLAY, END = "begin", "replay", "end"
READY_WITHIN_S = 600.0


class Recording(NamedTuple):
    """What the target did between `begin` and `replay`.

    Attributes:
        steps: how many.
        seconds: from the first one's begin to the last one's end.
        forward_s: of these, inside the model.
        bare_s: what the same batches take in a bare loop: the model, then judging the rows.
        rows: mean token rows of a step.
        streams: mean streams of a step.
    """

    steps: int
    seconds: float
    forward_s: float
    bare_s: float
    rows: float
    streams: float


class RecordedTarget:
    """The parent's side of the process.

    Attributes:
        address: of the service.
    """

    def __init__(self, pipe: Connection, port: int) -> None:
        self._pipe = pipe
        self.address = f"127.0.0.1:{port}"

    def begin(self) -> None:
        """Forgets the steps until now."""
        self._pipe.send(BEGIN)
        self._pipe.recv()

    def replay(self) -> Recording:
        """Runs the steps since `begin` again; nothing may be asked of the service meanwhile or afterwards."""
        self._pipe.send(REPLAY)
        found: Recording = self._pipe.recv()
        return found


@contextmanager
def recorded_target(flags: Sequence[str]) -> Iterator[RecordedTarget]:
    """Starts the process and ends it.

    Args:
        flags: of `python -m target_service`.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, [*flags, "--port", "0", "--no-prefix-caching"]))
    process.start()
    theirs.close()
    try:
        if not ours.poll(READY_WITHIN_S):
            raise RuntimeError("the target did not start")
        yield RecordedTarget(ours, ours.recv())
    finally:
        process.terminate()
        process.join()


def _main(pipe: Connection, flags: list[str]) -> None:
    asyncio.run(_serve(pipe, flags))


async def _serve(pipe: Connection, flags: list[str]) -> None:
    service = TargetService(located(parse(flags), "target"))
    port = await service.start()
    await service.ready()
    backend = service._backend
    recorder = _Recorder(backend._model)  # type: ignore[attr-defined]
    pipe.send(port)
    while (command := await asyncio.to_thread(pipe.recv)) != END:
        if command == BEGIN:
            recorder.steps.clear()
            pipe.send(None)
        else:
            pipe.send(await asyncio.wrap_future(backend._runner.call(recorder.replay)))  # type: ignore[attr-defined]


class _Recorder:
    """Stands before a model's `forward`."""

    def __init__(self, model: Model) -> None:
        self.steps: list[tuple[float, float, list[Span]]] = []
        self._forward = model.forward
        model.forward = self._recorded  # type: ignore[method-assign]

    def _recorded(self, spans: Sequence[Span]):  # type: ignore[no-untyped-def]
        began = time.perf_counter()
        logits = self._forward(spans)
        # A stream's list of blocks goes on growing.
        self.steps.append((began, time.perf_counter(), [span._replace(blocks=tuple(span.blocks)) for span in spans]))
        return logits

    def replay(self) -> Recording:
        opened = StreamOpen(stream_id=1, prompt_length=1, params=SamplingParams(temperature=0.0))
        a_round = Round(opened, [1], 1, PLAIN)
        began = time.perf_counter()
        for _, _, spans in self.steps:
            logits = self._forward(spans)
            if len(logits):
                judge(logits, [a_round] * len(logits))
        bare_s = time.perf_counter() - began
        count = len(self.steps)
        return Recording(
            count,
            self.steps[-1][1] - self.steps[0][0],
            sum(ended - begun for begun, ended, _ in self.steps),
            bare_s,
            sum(len(span.tokens) for _, _, spans in self.steps for span in spans) / count,
            sum(len(spans) for _, _, spans in self.steps) / count,
        )
