"""From the host's arrays to a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of these values.

    For a GPU the values go through pinned memory: from pageable memory the driver copies them aside first and has the
    caller wait for that. torch's pinned allocator gives a buffer back only when the copy from it is done.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def indices(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n] on a device, as `to_device`: `torch.tensor(values, device=...)` waits for all that a GPU still does."""
    return to_device(np.array(values, dtype=np.int64), device)
