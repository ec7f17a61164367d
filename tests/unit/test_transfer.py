"""What crosses between host and device."""

from __future__ import annotations

import numpy as np
import torch

from outrider.engine.transfer import indices, pack, read, to_device, unpack

CPU = torch.device("cpu")
COLUMNS = (
    torch.tensor([True, False, True]),
    torch.tensor([2**62 + 1, -5]),
    torch.tensor([[0.1, float("nan")], [-0.0, 3e-45]]).T,
    torch.empty((0, 4), dtype=torch.float64),
    torch.tensor([1 / 3], dtype=torch.float64),
)


def test_columns_of_all_types_come_back_bit_for_bit() -> None:
    """Guards ids beside probabilities: a common number type would round one of them."""
    for arrays in (unpack(pack(COLUMNS), COLUMNS), read(*COLUMNS)):
        for array, column in zip(arrays, COLUMNS, strict=True):
            assert array.shape == column.shape
            assert array.tobytes() == column.contiguous().numpy().tobytes()


def test_values_arrive_as_they_are() -> None:
    """Guards views with gaps and lists of nothing."""
    assert to_device(np.arange(6)[::2], CPU).tolist() == [0, 2, 4]
    assert indices([], CPU).dtype == indices([3], CPU).dtype == torch.int64
