"""The order in which a CUDA graph is recorded, on a stand-in for `torch.cuda`; tests/gpu has the real one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.engine import recorder
from outrider.engine.recorder import CudaRecorder


class Cuda:
    """Streams, captures and the check for reads, as far as a recorder can tell."""

    def __init__(self) -> None:
        self.current = "main"
        self.mode: int | str = 0
        self.is_capturing = False
        self.waits: list[tuple[str, str]] = []

    def Stream(self, device: Any) -> SimpleNamespace:
        return self._of("side")

    def CUDAGraph(self) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: None)

    def graph_pool_handle(self) -> int:
        return 7

    def current_stream(self, device: Any) -> SimpleNamespace:
        return self._of(self.current)

    def get_sync_debug_mode(self) -> int | str:
        return self.mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.mode = mode

    @contextlib.contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Any, *, pool: int, stream: SimpleNamespace, capture_error_mode: str) -> Iterator[None]:
        """As torch's (2.13): where the end of the capture fails, its stream stays the current one."""
        assert (pool, capture_error_mode) == (7, "thread_local")
        before, self.current, self.is_capturing = self.current, stream.name, True
        try:
            yield
        except RuntimeError as error:
            self.is_capturing = False
            raise RuntimeError("operation failed due to a previous error during capture") from error
        self.current, self.is_capturing = before, False

    def _of(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.waits.append((name, other.name)))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(recorder, "torch", SimpleNamespace(cuda=made))
    return made


def test_a_pass_is_warmed_up_and_checked_on_the_side_stream_before_it_is_captured(cuda: Cuda) -> None:
    """Guards the capture against what libraries do at their first call, and both streams against one another."""
    seen = []
    CudaRecorder(torch.device("cpu")).record(lambda: seen.append((cuda.current, cuda.mode, cuda.is_capturing)))
    assert seen == [("side", 0, False), ("side", "error", False), ("side", 0, True)]
    assert cuda.waits == [("side", "main"), ("main", "side")]
    assert (cuda.current, cuda.mode) == ("main", 0)


@pytest.mark.parametrize("when", ["checked", "captured"])
def test_a_pass_that_cannot_be_captured_leaves_no_traces(cuda: Cuda, when: str) -> None:
    """Guards steps after it: they must run on the stream that they ran on before, and may read the device."""

    def run() -> None:
        if cuda.is_capturing if when == "captured" else cuda.mode == "error":
            raise RuntimeError("reads the device")

    with pytest.raises(RuntimeError):
        CudaRecorder(torch.device("cpu")).record(run)
    assert (cuda.current, cuda.mode, cuda.is_capturing) == ("main", 0, False)
