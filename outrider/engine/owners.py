"""Owners: coordinators whose streams a service holds, by link epoch, and how long a lost link's streams are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.errors import InvalidArgument


@dataclass(slots=True)
class _Owner:
    epoch: int
    lease_end: float
    """Clock time at which its streams go; infinite while the link is up."""


class Owners:
    """Coordinators by their 16 bytes. Used in the engine thread only."""

    def __init__(self) -> None:
        self._owners: dict[bytes, _Owner] = {}

    def attach(self, owner: bytes, epoch: int) -> None:
        """A link came up.

        Raises:
            InvalidArgument: a link of the same or a newer epoch is known already.
        """
        known = self._owners.get(owner)
        if known is not None and epoch <= known.epoch:
            raise InvalidArgument("link_epoch", f"{epoch} is not above {known.epoch}, the epoch of a newer link")
        self._owners[owner] = _Owner(epoch, math.inf)

    def is_current(self, owner: bytes, epoch: int) -> bool:
        """Whether a link is its coordinator's latest."""
        known = self._owners.get(owner)
        return known is not None and known.epoch == epoch

    def lease(self, owner: bytes, end: float) -> None:
        """The link of a known coordinator went down; its streams are kept until `end` unless it comes back."""
        self._owners[owner].lease_end = end

    def expire(self, now: float) -> set[bytes]:
        """Forgets the coordinators whose lease has ended, and returns them."""
        gone = {owner for owner, state in self._owners.items() if state.lease_end <= now}
        for owner in gone:
            del self._owners[owner]
        return gone

    @property
    def next_end(self) -> float:
        """Clock time at which the first lease ends; infinite while all links are up."""
        return min((state.lease_end for state in self._owners.values()), default=math.inf)
