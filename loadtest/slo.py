"""Service level objectives: which answers were good enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadtest.outcome import Outcome
from outrider.errors import InvalidArgument

METRICS = ("ttft", "tpot", "e2el")


def parse(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` as milliseconds by metric.

    Raises:
        InvalidArgument: an unknown metric, or no positive number.
    """
    limits: dict[str, float] = {}
    for text in (part for words in texts for part in words.replace(",", " ").split()):
        name, _, number = text.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = 0.0
        if name not in METRICS or not 0 < limit < float("inf"):
            raise InvalidArgument("goodput", f"{text!r} is not one of {', '.join(METRICS)} with milliseconds: ttft:200")
        limits[name] = limit
    return limits


def is_good(outcome: Outcome, limits_ms: Mapping[str, float]) -> bool:
    """Whether an answer meets all limits; one token has no time per token, which is within any limit."""
    if outcome.failure is not None:
        return False
    values = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2el": outcome.e2el_s}
    return all((values[name] or 0.0) * 1000 <= limit for name, limit in limits_ms.items())
