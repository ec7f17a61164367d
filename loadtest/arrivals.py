"""When requests are planned to be sent, as offsets from the start of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from outrider.errors import InvalidArgument


def poisson(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """`count` arrivals at `rate` a second, gaps drawn from a gamma law of shape `burstiness`.

    1 is a Poisson process, below 1 burstier, above 1 more even. Infinite rate: all at once. Offsets add up exactly;
    nothing is slept from gap to gap.

    Raises:
        InvalidArgument: rate or burstiness is not positive.
    """
    if not rate > 0:
        raise InvalidArgument("request-rate", f"must be positive, got {rate:g}")
    if not 0 < burstiness < float("inf"):
        raise InvalidArgument("burstiness", f"must be a positive number, got {burstiness:g}")
    if rate == float("inf"):
        return [0.0] * count
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=max(count - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def constant(count: int, rate: float) -> list[float]:
    """`count` arrivals, evenly spaced.

    Raises:
        InvalidArgument: rate is not positive.
    """
    if not rate > 0:
        raise InvalidArgument("request-rate", f"must be positive, got {rate:g}")
    return [index / rate for index in range(count)]


class TraceEntry(NamedTuple):
    """One line of a trace: offset in seconds, and the length of the answer if the trace states it."""

    at_s: float
    output_tokens: int | None


def trace(path: Path) -> list[TraceEntry]:
    """Arrivals from JSON lines with `timestamp` (seconds) or `timestamp_ms`, and optionally `output_tokens` or
    `output_length`; offsets count from the earliest.

    Raises:
        InvalidArgument: a line is not such an object; the message names it.
    """
    entries = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            at_s = float(row["timestamp"]) if "timestamp" in row else float(row["timestamp_ms"]) / 1000
            length = row.get("output_tokens", row.get("output_length"))
            entries.append(TraceEntry(at_s, None if length is None else int(length)))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            raise InvalidArgument("trace", f"line {number} has no timestamp: {line[:80]}") from None
    if not entries:
        raise InvalidArgument("trace", f"{path} is empty")
    first = min(entry.at_s for entry in entries)
    return sorted(TraceEntry(entry.at_s - first, entry.output_tokens) for entry in entries)
