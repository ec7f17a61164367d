"""The roll of coordinators: who is there, where, and what each has counted."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from cluster.exposition import merge

logger = logging.getLogger(__name__)

LOST_S = 10.0
"""A coordinator that has not reported for so long is gone."""
_MOST_GONE = 32
"""Last reports of coordinators that are gone, before they are added up into one."""


class Member(NamedTuple):
    """One coordinator, as it last reported.

    Attributes:
        grpc: address of its `Generate`.
        reason: why it takes no requests, or empty.
    """

    node: str
    grpc: str
    reason: str
    model: str


@dataclass
class _Seat:
    ordinal: int
    heard_s: float
    member: Member | None = None
    exposition: str = ""


class Roll:
    """Times are those of one monotonic clock."""

    def __init__(self) -> None:
        self._seats: dict[str, _Seat] = {}
        self._gone: dict[str, str] = {}

    def join(self, replica: str, now_s: float) -> int:
        """A coordinator starts, or is back; returns its ordinal, the smallest that no other has."""
        self._sweep(now_s)
        self._gone.pop(replica, None)  # what it counted it still has
        if replica not in self._seats:
            taken = {seat.ordinal for seat in self._seats.values()}
            ordinal = next(number for number in range(len(taken) + 1) if number not in taken)
            self._seats[replica] = _Seat(ordinal, now_s)
        return self._seats[replica].ordinal

    def report(self, replica: str, member: Member, exposition: str, now_s: float) -> None:
        """A coordinator is there, and has counted so much."""
        self.join(replica, now_s)
        seat = self._seats[replica]
        seat.member, seat.exposition, seat.heard_s = member, exposition, now_s

    def leave(self, replica: str, exposition: str) -> None:
        """A coordinator ends, having counted so much."""
        self._seats.pop(replica, None)
        self._gone[replica] = exposition

    def members(self, now_s: float) -> dict[str, Member]:
        """Those that are there."""
        self._sweep(now_s)
        return {replica: seat.member for replica, seat in self._seats.items() if seat.member is not None}

    def exposition(self, now_s: float) -> str:
        """The series of all of them together."""
        self._sweep(now_s)
        if len(self._gone) > _MOST_GONE:
            self._gone = {"": merge((), self._gone.values())}
        return merge([seat.exposition for seat in self._seats.values()], self._gone.values())

    def _sweep(self, now_s: float) -> None:
        for replica in [replica for replica, seat in self._seats.items() if now_s - seat.heard_s > LOST_S]:
            logger.warning("coordinator %s has not been heard of for %g s", replica, LOST_S)
            self._gone[replica] = self._seats.pop(replica).exposition
