"""The draft's planted error; see `outrider.planted`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draft_service.job import Job
from outrider.distribution import CountRow
from outrider.planted import Plant


def raw_q(jobs: Sequence[Job], supports: Sequence[CountRow], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices into the supports: as drawn, but the argmax where a stream asks for RAW_Q."""
    greedy = [job.opened.planted is Plant.RAW_Q for job in jobs]
    if not any(greedy):
        return chosen
    return np.where(greedy, [np.argmax(support.counts) for support in supports], chosen)
