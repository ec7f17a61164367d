"""Columns: typed arrays inside `bytes` fields, read without a copy and checked against their neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidArgument

U8 = np.dtype("u1")
U16 = np.dtype("<u2")
U32 = np.dtype("<u4")
U64 = np.dtype("<u8")
F32 = np.dtype("<f4")


def read(name: str, data: bytes, dtype: np.dtype[Any], length: int | None = None) -> NDArray[Any]:
    """The array in a column; it borrows the message's memory and is read-only.

    Args:
        name: of the column, for the error.
        data: the column.
        dtype: little-endian element type.
        length: elements that there must be; None takes any number.

    Raises:
        InvalidArgument: the bytes are no whole number of elements, or another number of elements.
    """
    elements, rest = divmod(len(data), dtype.itemsize)
    if rest:
        raise InvalidArgument(name, f"{len(data)} bytes are no whole number of {dtype.itemsize}-byte elements")
    if length is not None and elements != length:
        raise InvalidArgument(name, f"has {elements} elements where the other columns call for {length}")
    return np.frombuffer(data, dtype)


def write(values: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """The bytes of a column."""
    return np.ascontiguousarray(values, dtype).tobytes()


def total(counts: NDArray[Any]) -> int:
    """Sum of a column of counts, wide enough not to wrap."""
    return int(counts.sum(dtype=np.uint64))


def offsets(counts: NDArray[Any]) -> list[int]:
    """Where each item's part of a flat column starts, and behind the last one where it ends: n + 1 positions."""
    return [0, *np.cumsum(counts, dtype=np.int64).tolist()]
