"""Acceptance at a set rate, to measure the system apart from the draft. The text that comes of it means nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.state import StreamState
from outrider.noise import Role, uniforms

I64 = NDArray[np.int64]

METHOD = "synthetic"
"""Of `rejection_sample_method`."""


def synthetic_counts(states: Sequence[StreamState], k: I64, m: I64, slots: I64) -> I64:
    """Accepted slots of each round: by coins where the request is synthetic, as they were otherwise.

    Args:
        k: [n] slots that the rule accepts.
        m: [n] slots of each round.
        slots: [sum of m] slot within its round, from 0.
    """
    rates = np.array([-1.0 if state.request.synthetic is None else state.request.synthetic for state in states])
    if not (rates >= 0).any():
        return k
    u = uniforms(
        np.repeat(np.array([state.keys.accept for state in states], np.uint64), m),
        np.repeat(np.array([state.committed for state in states], np.uint32), m),
        slots.astype(np.uint32),
        np.repeat(np.array([state.request.sample_index for state in states], np.uint32), m),
        Role.ACCEPT,
    )
    rejected = u >= np.repeat(rates, m)
    owner = np.repeat(np.arange(len(m)), m)
    first = m.copy()
    np.minimum.at(first, owner[rejected], slots[rejected])
    return np.where(rates >= 0, first, k)
