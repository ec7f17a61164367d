"""Times a forward pass without having anybody wait for it: on a GPU by events, which are read when the answers are."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


class Stopwatch:
    """Runs from when it is made.

    Args:
        device: of the model, as in `ModelInfo`.
    """

    def __init__(self, device: str) -> None:
        self._began_s = time.monotonic()
        self._stream = self._began = None
        if device.startswith("cuda"):
            self._stream = torch.cuda.current_stream(device)
            self._began = torch.cuda.Event(enable_timing=True)
            self._began.record(self._stream)

    def stop(self, result: Tensor) -> Callable[[], float]:
        """The pass that gives `result` is queued, or done; returns what says how many milliseconds it takes.

        On a GPU that is the device's time, idle moments between kernels included, not the time of queueing them; who
        asks before the end waits for it.
        """
        if result.is_cuda:
            stream = torch.cuda.current_stream(result.device)
            began, ended = self._began, torch.cuda.Event(enable_timing=True)
            if began is not None and stream == self._stream:
                ended.record(stream)
                return lambda: _elapsed_ms(began, ended)
            stream.synchronize()  # Events of several devices cannot be compared.
        elapsed_ms = 1_000 * (time.monotonic() - self._began_s)
        return lambda: elapsed_ms


def _elapsed_ms(began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    ended.synchronize()
    return began.elapsed_time(ended)
