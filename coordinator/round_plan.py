"""RoundPlan: what a stream's next round is to be: drafted, with how many tokens, or plain, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator import round_end
from coordinator.auto_gamma import Auto
from coordinator.config import DecoderConfig
from coordinator.costs import Costs
from coordinator.draft_side import DraftSide
from coordinator.gamma import BySize, Controller, Fixed
from coordinator.streams import Registry, Stream
from coordinator.target_side import TargetSide

_BRIDGE_RUN = 4
"""Tokens of a plain run that only bridges a wait for the draft, so that drafting begins soon after it is over."""
_BRIDGING = ("catching_up", "held", "kv")


class RoundPlan:
    """Weighs what request and server fix, what the controller has learnt, and what there is room for.

    Attributes:
        controller: chooses gamma where nobody has fixed it.
    """

    def __init__(
        self, config: DecoderConfig, streams: Registry, costs: Costs, target: TargetSide, draft: DraftSide
    ) -> None:
        self._config = config
        self._target = target
        self._draft = draft
        self.controller = _controller(config, streams, costs)

    def wanted(self, stream: Stream) -> int | None:
        """The gamma that request or server fix; None leaves it to the controller."""
        asked, server = stream.state.request.num_speculative_tokens, self._config.num_speculative_tokens
        if asked is not None:
            return asked
        return None if server == "auto" else server

    def drafts_next(self, stream: Stream) -> bool:
        """Whether a stream that is decoded plainly is to go over to drafting."""
        return self.wanted(stream) is not None or self.controller.wants(stream.state.stream_id)

    def draft_limit(self, stream: Stream) -> tuple[str | None, int]:
        """Why the stream cannot be drafted for now, or None and the largest gamma that there is room for."""
        if self.wanted(stream) == 0:
            return "off", 0
        reason = self._draft.why_not(stream)
        if reason is not None:
            return reason, 0
        target, draft = self._target.info, self._draft.link.info if self._draft.link is not None else None
        assert target is not None and draft is not None
        # A round emits up to gamma + 1 tokens.
        limit = min(
            round_end.room(stream.state, target.max_model_len) - 1,
            self._config.largest_gamma,
            target.max_slots,
            draft.max_slots,
        )
        if draft.max_model_len:
            limit = min(limit, draft.max_model_len - stream.state.committed)
        return ("no_room", 0) if limit < 1 else (None, limit)

    def gammas(self, streams: Sequence[Stream], limits: Sequence[int]) -> list[int]:
        """What the requests fix, and what the controller chooses for the others."""
        free = [
            (index, stream)
            for index, stream in enumerate(streams)
            if stream.state.request.num_speculative_tokens is None
        ]
        gammas = [min(self.wanted(stream) or 0, limit) for stream, limit in zip(streams, limits, strict=True)]
        if free:
            ids = [stream.state.stream_id for _, stream in free]
            chosen = self.controller.choose(ids, [limits[index] for index, _ in free])
            for (index, _), gamma in zip(free, chosen, strict=True):
                gammas[index] = gamma
        return gammas

    def least_survival(self, stream: Stream) -> float:
        """The chance below which the draft may cut a proposal short; a gamma that somebody fixed is not cut.

        Neither is a proposal that is accepted at a set rate: how sure the draft is says nothing about that rate.
        """
        may_stop = self.wanted(stream) is None and stream.state.request.synthetic is None
        return self.controller.least_survival if may_stop else 0.0

    def credit(self, reason: str | None) -> int:
        """Tokens that a plain run may be ahead."""
        return min(_BRIDGE_RUN, self._config.run_credit) if reason in _BRIDGING else self._config.run_credit


def _controller(config: DecoderConfig, streams: Registry, costs: Costs) -> Controller:
    gamma, ranges = config.num_speculative_tokens, config.num_speculative_tokens_per_batch_size
    if gamma != "auto":
        return Fixed(gamma)
    if ranges:
        return BySize(ranges, lambda: len(streams))
    return Auto(config.max_num_speculative_tokens, costs)
