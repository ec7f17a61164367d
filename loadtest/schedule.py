"""The best gamma by batch size, as a table that `outrider up --schedule` starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Range = tuple[int, int, int]
"""First and last batch, both included, and the drafted tokens per round."""


def ranges(batches: Sequence[int], ratios: Mapping[int, Sequence[float]]) -> list[Range]:
    """For every batch from 1 to the largest that was measured, the gamma of the largest ratio; 0 where none exceeds 1.

    Between measured batches the ratios are taken as straight lines, below the smallest one as constant.

    Args:
        batches: ascending.
        ratios: by fixed gamma (0 need not be among them): [batches] throughput over plain decoding's.
    """
    wanted = np.arange(1, max(batches) + 1)
    gammas = [0, *sorted(gamma for gamma in ratios if gamma > 0)]
    curves = np.ones((len(gammas), len(wanted)))
    for row, gamma in enumerate(gammas[1:], 1):
        curves[row] = np.interp(wanted, batches, ratios[gamma])
    best = [gammas[row] for row in curves.argmax(axis=0)]
    found: list[Range] = []
    for batch, gamma in zip(wanted.tolist(), best, strict=True):
        if found and found[-1][2] == gamma:
            found[-1] = (found[-1][0], batch, gamma)
        else:
            found.append((batch, batch, gamma))
    return found
