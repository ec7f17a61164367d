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
    return type(parts[0])(
        **{field.name: _merge_field([getattr(part, field.name) for part in parts], parts) for field in fields(parts[0])}
    )


def _merge_field(values: list[Any], parts: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, Timings):
        return values[-1]
    if is_dataclass(first):
        return _merge(values)
    assert isinstance(parts[0], Replies), f"no rule for merging {type(first)}"
    return _shift_errors(parts)


def _shift_errors(parts: list[Replies]) -> dict[int, str]:
    errors: dict[int, str] = {}
    before = 0
    for part in parts:
        errors.update({before + index: message for index, message in part.errors.items()})
        before += len(part)
    return errors
