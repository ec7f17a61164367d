"""Watches the acceptance of the pair for drift; says so, and never acts on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from coordinator.parts import Degraded, PartInfo
from coordinator.request import DecodingRequest
from outrider import drift
from outrider.drift import Drift, View
from outrider.planted import Plant

logger = logging.getLogger(__name__)

PART = "acceptance"
"""Under this name a drift stands among the degraded parts: every service does its work, so it is none of them."""


class AcceptanceWatch:
    """The change test of `outrider.drift` over all rounds of one pair of models; another pair has its own baseline.

    Args:
        baseline: share of rounds whose first drafted token is accepted when all is well; None learns it.
        clock: monotonic, in seconds.
    """

    def __init__(self, baseline: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._given = baseline
        self._clock = clock
        self._since_s = 0.0
        self._pair: tuple[str, ...] | None = None
        self._drift = self._fresh()

    def pair(self, target: PartInfo | None, draft: PartInfo | None) -> None:
        """The models that decode now. While one is away nothing changes: it may come back."""
        if target is None or draft is None:
            return
        pair = (target.model_id, target.weight_hash, draft.model_id, draft.weight_hash)
        if self._pair not in (None, pair):
            logger.info("another pair of models: its acceptance is watched anew")
            self._drift = self._fresh()
        self._pair = pair

    def add(self, request: DecodingRequest, tested: int, accepted: int) -> None:
        """Adds a round with a draft; rounds that measure something else on purpose are left out."""
        if tested == 0 or request.synthetic is not None or request.planted is not Plant.NONE:
            return
        was, had_baseline = self._drift.drifted, self._drift.baseline is not None
        if self._drift.add(accepted > 0):
            self._block_ended(was, had_baseline)

    @property
    def view(self) -> View:
        return self._drift.view

    @property
    def degraded(self) -> list[Degraded]:
        """The entry for `/ready`, if there is a drift."""
        if not self._drift.drifted:
            return []
        return [Degraded(PART, self._reason(), self._clock() - self._since_s)]

    def _fresh(self) -> Drift:
        return Drift(None if self._given is None else drift.given(self._given))

    def _block_ended(self, was: bool, had_baseline: bool) -> None:
        view = self._drift.view
        if not had_baseline and view.baseline is not None:
            logger.info(
                "acceptance: the first drafted token is accepted in %.1f%% of rounds, the baseline from now on "
                "(--acceptance-baseline %.3f keeps it over a restart)",
                100 * view.baseline,
                view.baseline,
            )
        if view.drifted and not was:
            self._since_s = self._clock()
            logger.warning("acceptance: %s", self._reason())
        elif was and not view.drifted:
            logger.info("acceptance: back at its baseline")

    def _reason(self) -> str:
        view = self._drift.view
        assert view.baseline is not None and view.recent is not None
        return (
            f"the first drafted token is accepted in {view.recent:.1%} of rounds, the baseline is {view.baseline:.1%}: "
            "the traffic or the models changed; texts are not affected"
        )
