"""Patience: how long the draft may take over a proposal or a prompt before it is waited for no longer."""

from __future__ import annotations

import math
from typing import NamedTuple

from coordinator.costs import Costs
from coordinator.state import Phase
from coordinator.streams import Registry, Stream

OVERDUE_FACTOR = 3.0
OVERDUE_FLOOR_S = 0.005
OVERDUE_STEP_SHARE = 0.5
"""The draft is given so many times what such a proposal takes, and no less than the floor and this share of a target
step; a proposal is overdue after as much time again. So a busy machine loses no proposal that is still cheap beside
the plain step it would be given up for, and a hung draft costs about a step."""
UNMEASURED_S = 2.0
"""How long a proposal may take while nothing has been measured."""
CATCH_UP_LIMIT_S = 2.0
CATCH_UP_TOKEN_S = 0.005
"""A catch-up is overdue after the limit and this much per token of all of them, if the draft says nothing meanwhile."""

_MAX_DEADLINE_MS = 65_535


class Limit(NamedTuple):
    """For one proposal.

    Attributes:
        deadline_ms: after which the draft is to answer with what it has; 0 for none.
        overdue_s: after which it is not waited for any more.
    """

    deadline_ms: int
    overdue_s: float


class Patience:
    """Limits from what has been learnt of draft and target."""

    def __init__(self, costs: Costs, streams: Registry) -> None:
        self._costs = costs
        self._streams = streams

    @property
    def floor_s(self) -> float:
        """What any proposal is given, at the present number of streams."""
        step_s = float(self._costs.target.predict(len(self._streams)))
        return max(OVERDUE_FLOOR_S, OVERDUE_STEP_SHARE * step_s)

    def of_proposal(self, gamma: int, floor_s: float) -> Limit:
        """For so many slots, and no less than the floor."""
        usual_s = OVERDUE_FACTOR * self._costs.draft.bound(gamma)
        if not usual_s:
            return Limit(0, UNMEASURED_S)
        enough_s = max(usual_s, floor_s)
        deadline_ms = min(math.ceil(1_000 * enough_s), _MAX_DEADLINE_MS)
        return Limit(deadline_ms, deadline_ms / 1_000 + enough_s)

    def of_catch_up(self) -> float:
        """Seconds for all catch-ups together.

        What was sent counts, not what is committed by now: plain decoding goes on and would push the limit out.
        """
        drafts = [other.state.draft for other in self._streams if _catching_up(other)]
        sent = sum(draft.outstanding.committed - draft.held for draft in drafts if draft.outstanding)
        return CATCH_UP_LIMIT_S + CATCH_UP_TOKEN_S * sent


def _catching_up(stream: Stream) -> bool:
    return stream.state.draft.outstanding is not None and stream.state.phase is not Phase.DRAFTING
