"""Times of passes by the roofline, and what they mean for a pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.economics import expected_tokens
from outrider.planning.cards import CardData
from outrider.planning.shape import Shape

BANDWIDTH_SHARE = 0.8
FLOPS_SHARE = 0.6
"""Shares of the published figures that kernels usually reach. Assumptions: measure with `outrider bench sweep`."""

MEMORY_SHARE = 0.9
_WORKSPACE = 1.05
"""Weights times this: allocator slack and activations."""
_LARGEST_BATCH = 4096

Q_BYTES_PER_SLOT = 200
Q_BYTES_PER_PROPOSAL = 23
"""Of the sparse form with 32 ids: id, count, own count and support size of a slot, and the echo of an item. For five
slots that makes 1,023 bytes, as `bench/wire_cost.py` measures."""
_FEATURE_LAYERS = 3
_FEATURE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Side:
    """A model on a card."""

    shape: Shape
    card: CardData

    def pass_s(self, rows: float, context_tokens: float) -> float:
        """Seconds of a pass: weights read or multiplied, whichever takes longer, and the KV of all streams read.

        Args:
            rows: tokens in the pass.
            context_tokens: positions whose KV is read, over all streams.
        """
        per_row = context_tokens / max(rows, 1)
        flops = rows * (2 * self.shape.active_params + self.shape.attention_flops_per_position * per_row)
        weights_s = self.shape.read_bytes(rows) / (BANDWIDTH_SHARE * self.card.bytes_per_s)
        compute_s = flops / (FLOPS_SHARE * self.card.flops)
        kv_s = context_tokens * self.shape.kv_bytes_per_token / (BANDWIDTH_SHARE * self.card.bytes_per_s)
        return max(weights_s, compute_s) + kv_s

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights; negative if the weights do not fit."""
        room = MEMORY_SHARE * self.card.memory_bytes - _WORKSPACE * self.shape.weights_bytes
        return math.floor(room / self.shape.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class Forecast:
    """A pair under load.

    Attributes:
        acceptance: s_i, chance of a slot given the ones before it.
        context: tokens of a stream, prompt and answer so far.
        round_trip_s: over both links of a round: what a round takes beyond the two passes.
    """

    target: Side
    draft: Side
    acceptance: Sequence[float]
    context: int
    round_trip_s: float

    def plain_s(self, streams: int) -> float:
        """Seconds of a step of plain decoding."""
        return self.target.pass_s(streams, streams * self.context)

    def round_s(self, streams: int, gamma: int) -> float:
        """Seconds of a round: gamma draft passes, the round trip, one verification."""
        if gamma == 0:
            return self.plain_s(streams)
        drafting = gamma * self.draft.pass_s(streams, streams * self.context)
        return drafting + self.round_trip_s + self.target.pass_s(streams * (gamma + 1), streams * self.context)

    def tokens_per_s(self, streams: int, gamma: int) -> float:
        return streams * expected_tokens(self.acceptance, gamma) / self.round_s(streams, gamma)

    def ratio(self, streams: int, gamma: int) -> float:
        """Throughput over plain decoding's."""
        return self.tokens_per_s(streams, gamma) / self.tokens_per_s(streams, 0)

    def best_gamma(self, streams: int) -> int:
        """The best fixed gamma from 1 on, whether or not it pays."""
        return max(range(1, len(self.acceptance) + 1), key=lambda gamma: self.ratio(streams, gamma))

    def crossover(self) -> int | None:
        """The smallest number of streams at which no gamma pays; None if there is none up to 4096."""
        low, high = 0, 1
        while self.ratio(high, self.best_gamma(high)) > 1:
            low, high = high, 2 * high
            if high > _LARGEST_BATCH:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.ratio(middle, self.best_gamma(middle)) > 1 else (low, middle)
        return high

    def break_even_round_trip_s(self, streams: int) -> float:
        """The round trip at which the best gamma gains nothing; negative if it gains nothing at any."""
        return max(
            expected_tokens(self.acceptance, gamma) * self.plain_s(streams)
            - self.round_s(streams, gamma)
            + self.round_trip_s
            for gamma in range(1, len(self.acceptance) + 1)
        )

    def streams_that_fit(self) -> tuple[int, int]:
        """Streams of this context that the target's and the draft's KV hold."""
        return self.target.kv_tokens // self.context, self.draft.kv_tokens // self.context

    def q_mbit_per_s(self, streams: int, gamma: int) -> float:
        """Of proposals, on each of the two links that they cross."""
        proposal = Q_BYTES_PER_PROPOSAL + gamma * Q_BYTES_PER_SLOT
        return 8e-6 * proposal * streams / self.round_s(streams, gamma)

    def feature_mbit_per_s(self, streams: int, gamma: int) -> float:
        """Of hidden states for a draft that builds on them: gamma + 1 rows a round, on each of two links."""
        rows = (gamma + 1) * _FEATURE_LAYERS * self.target.shape.hidden * _FEATURE_BYTES
        return 8e-6 * rows * streams / self.round_s(streams, gamma)
