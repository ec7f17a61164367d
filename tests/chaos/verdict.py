"""What a run of faults has shown: which ends of requests are excused, and the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.chaos.faults import KINDS
from tests.chaos.load import ERROR, OK, REFUSED, UNAVAILABLE, Attempt

_MARGIN_S = 1.0
"""What was read just before the end of a fault is answered just after it."""


class Fault(NamedTuple):
    """One fault; times are monotonic seconds.

    Attributes:
        healed_s: when what was taken away was there again.
        recovered_s: when all parts were attached.
        complaint: what was wrong beside the requests, or empty.
    """

    kind: str
    began_s: float
    healed_s: float
    recovered_s: float
    complaint: str = ""

    def touches(self, attempt: Attempt) -> bool:
        return attempt.began_s < self.recovered_s + _MARGIN_S and attempt.ended_s > self.began_s

    def excuses(self, attempt: Attempt) -> bool:
        """Whether it explains how an attempt ended."""
        kind = KINDS[self.kind]
        if attempt.end not in kind.excuses or not self.touches(attempt):
            return False
        return attempt.began_s >= self.began_s or not kind.spares_running


def unexcused(faults: Sequence[Fault], attempts: Sequence[Attempt]) -> list[str]:
    """Attempts that no fault explains, and what else was wrong, a line each."""
    lines = [f"{fault.kind}: {fault.complaint}" for fault in faults if fault.complaint]
    for attempt in attempts:
        if attempt.end == OK or any(fault.excuses(attempt) for fault in faults):
            continue
        near = [f"{one.kind} (+{attempt.began_s - one.began_s:.1f} s)" for one in faults if one.touches(attempt)]
        took_s = attempt.ended_s - attempt.began_s
        during = ", ".join(near) or "no fault"
        lines.append(f"{attempt.end} after {took_s:.1f} s, during {during}: {attempt.detail[:400]}")
    return lines


def table(faults: Sequence[Fault], attempts: Sequence[Attempt]) -> str:
    """A row per kind: faults, attempts that met one, how they ended, and the slowest recovery."""
    rows = [("fault", "times", "attempts", "unharmed", "error frames", "cut", "worst recovery")]
    for kind in KINDS:
        own = [fault for fault in faults if fault.kind == kind]
        if not own:
            continue
        met = [attempt for attempt in attempts if _belongs(attempt, own, faults)]
        ends = Counter(attempt.end for attempt in met)
        framed = ends[ERROR] + ends[REFUSED] + ends[UNAVAILABLE]
        worst_s = max(fault.recovered_s - fault.healed_s for fault in own)
        counts = (len(own), len(met), ends[OK], framed, len(met) - ends[OK] - framed)
        rows.append((kind, *map(str, counts), f"{worst_s:.1f} s"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if index == 0 else cell.rjust(width) for index, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    )


def _belongs(attempt: Attempt, own: Sequence[Fault], faults: Sequence[Fault]) -> bool:
    """Whether an attempt counts as one that met these faults; how it ended is not laid to a neighbour's fault."""
    if not any(fault.touches(attempt) for fault in own):
        return False
    if attempt.end == OK or any(fault.excuses(attempt) for fault in own):
        return True
    return not any(fault.excuses(attempt) for fault in faults)


def summary(attempts: Sequence[Attempt], held: Mapping[str, int]) -> str:
    """One line on all requests."""
    ends = Counter(attempt.end for attempt in attempts)
    requests = len({attempt.request for attempt in attempts})
    counted = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    left = ", ".join(f"{count} {what}" for what, count in held.items()) or "nothing"
    return f"{requests} requests, attempts: {counted}; held by the services at the end: {left}"
