"""The target's planted error; see `outrider.planted`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.engine.transfer import indices
from outrider.planted import Plant
from target_service.round import Round


def row_shift(logits: Tensor, rounds: Sequence[Round]) -> Tensor:
    """[rows, vocab] as they are, but where a stream asks for ROW_SHIFT each row of its round is the next one.

    The last row stays: there is none behind it.
    """
    if not any(a_round.opened.planted is Plant.ROW_SHIFT for a_round in rounds):
        return logits
    rows, start = [], 0
    for a_round in rounds:
        shift = int(a_round.opened.planted is Plant.ROW_SHIFT)
        last = a_round.rows - 1
        rows += [start + min(row + shift, last) for row in range(a_round.rows)]
        start += a_round.rows
    return logits[indices(rows, logits.device)]
