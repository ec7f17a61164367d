"""From the host's arrays to a device without waiting for it, and back with one wait."""

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


def read(*tensors: Tensor) -> tuple[NDArray[Any], ...]:
    """Tensors of one device as arrays; a GPU is waited for once, not once for each."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return tuple(tensor.numpy() for tensor in tensors)
    return unpack(pack(tensors).cpu(), tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors in a row, uint8 on their device."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def unpack(packed: Tensor, like: Sequence[Tensor]) -> tuple[NDArray[Any], ...]:
    """The arrays that `pack` made `packed` of; it is on the host, and of `like` only types and shapes are looked at."""
    sizes = [tensor.nbytes for tensor in like]
    # A copy each, because a type may only be looked at where its size says.
    parts = (part.clone().view(tensor.dtype) for part, tensor in zip(packed.split(sizes), like, strict=True))
    return tuple(part.view(tensor.shape).numpy() for part, tensor in zip(parts, like, strict=True))
