"""What makes a pass over fixed memory repeatable: on a GPU, a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

Replay = Callable[[], None]


class Recorder(Protocol):
    """Makes a function over fixed memory repeatable."""

    def record(self, run: Replay) -> Replay:
        """Runs it, and returns what does the same again on whatever lies in its inputs then."""
        ...


class CudaRecorder:
    """Records into CUDA graphs, all in one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Replay) -> Replay:
        """
        Raises:
            RuntimeError: something in it cannot be captured, e.g. because it reads the device.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # Without capturing: libraries make handles and workspaces at their first call on a stream.
            with _reading_is_an_error():
                run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # The outer context, because torch's own leaves the thread on the side stream where the end of a capture fails.
        # Other threads of the process may use the device meanwhile.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            run()
        return graph.replay


@contextlib.contextmanager
def _reading_is_an_error() -> Iterator[None]:
    """A pass that reads the device fails here; in a capture too, but there torch's allocator would go on capturing."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
