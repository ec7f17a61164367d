"""A reduced vocabulary: which of the target's ids the columns of a draft's logits stand for."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.seam import U32

Ints = NDArray[np.int64]


class DraftIds:
    """The ids that a draft can propose. What it cannot has q = 0, which is as exact as any other q.

    Args:
        ids: [n] the target's id of each column, rising.
        vocab_rows: ids that the target has.
    """

    def __init__(self, ids: Ints, vocab_rows: int) -> None:
        self._ids = ids
        self._vocab_rows = vocab_rows
        self._on_device = torch.from_numpy(ids.astype(np.int32))

    def on(self, device: torch.device) -> Tensor:
        """int32 tensor [n]; stays where it was asked for last."""
        self._on_device = self._on_device.to(device)
        return self._on_device

    def of(self, columns: Ints) -> Ints:
        """The target's ids of columns."""
        return self._ids[columns]

    def columns(self, ids: U32) -> Ints:
        """The columns that stand for any of these ids."""
        return np.flatnonzero(np.isin(self._ids, ids))

    def widen(self, logits: Tensor) -> Tensor:
        """Rows over all of the target's ids, -inf where the draft has none."""
        wide = logits.new_full((len(logits), self._vocab_rows), -torch.inf)
        wide[:, self.on(logits.device).long()] = logits
        return wide
