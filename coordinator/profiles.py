"""Takes up what services say of themselves: costs, fitted to the present load, and how much of their KV is in use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from coordinator.costs import Costs
from coordinator.link import Link
from coordinator.streams import Registry

logger = logging.getLogger(__name__)

ASK_S = 5.0
"""Seconds between two questions to a service: what it measured of itself, and its KV in use."""


class Profiles:
    """Asks every service that is up now and then; called a few times a second.

    Args:
        costs: to be kept up to date.
        targets: links to the targets; the first one that is up speaks for all.
        draft: link to the draft, or None.
        streams: all open ones.
    """

    def __init__(
        self, costs: Costs, targets: Sequence[Link[Any, Any]], draft: Link[Any, Any] | None, streams: Registry
    ) -> None:
        self._costs = costs
        self._targets = targets
        self._draft = draft
        self._streams = streams
        self._asked_s: dict[Link[Any, Any], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, now_s: float) -> None:
        """One look at the links and the load."""
        up = [link for link in self._targets if link.is_up]
        self._costs.replicas = max(1, len(up))
        if up and up[0].info is not None:
            self._costs.target_profile = up[0].info.costs
            self._costs.link_s = self._costs.link_s or up[0].round_trip_s
        for link in up:
            self._ask(link, now_s)
        draft = self._draft
        if draft is not None and draft.is_up and draft.info is not None:
            self._costs.draft_profile, self._costs.draft_link_s = draft.info.costs, draft.round_trip_s
            self._ask(draft, now_s)
        lengths = [stream.state.committed for stream in self._streams]
        if lengths:
            self._costs.expect(len(lengths), sum(lengths) / len(lengths))

    def _ask(self, link: Link[Any, Any], now_s: float) -> None:
        if now_s - self._asked_s.get(link, 0.0) < ASK_S:
            return
        self._asked_s[link] = now_s
        task = asyncio.get_running_loop().create_task(link.refresh())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
