"""Joining reply batches: what several engine steps finished before one event-loop turn leaves as one message."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

from outrider.seam import Replies, Timings

T = TypeVar("T")


def merge(batches: list[T]) -> T:
    """One batch with the items of all, in order; its timings are those of the latest step.

    Args:
        batches: at least one `ProposalBatch`, or at least one `VerdictBatch`.
    """
    return batches[0] if len(batches) == 1 else _merge(batches)


def _merge(parts: list[Any]) -> Any:
    merged = {
        field.name: _merge_field([getattr(part, field.name) for part in parts], parts) for field in fields(parts[0])
    }
    return type(parts[0])(**merged)


def _merge_field(values: list[Any], parts: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, Timings):
        # Credit that goes back after a step is a batch without one, and must not hide the step's times.
        return next((timings for timings in reversed(values) if timings != Timings()), first)
    if is_dataclass(first):
        return _merge(values)
    assert isinstance(parts[0], Replies), f"no rule for merging {type(first)}"
    return _shift(values, parts)


def _shift(values: list[dict[int, Any]], parts: list[Replies]) -> dict[int, Any]:
    """What is kept by item index."""
    shifted: dict[int, Any] = {}
    before = 0
    for value, part in zip(values, parts, strict=True):
        shifted.update({before + index: entry for index, entry in value.items()})
        before += len(part)
    return shifted
