"""What became of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """Text that arrived together: when, and how many tokens the server had then counted (None if it does not say)."""

    at_s: float
    tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request, answered or not. Times are seconds on the run's clock.

    Attributes:
        planned_s: when it should have been sent; every latency starts here, so a stalled server cannot hide the wait
            of the requests behind it (coordinated omission).
        sent_s: when it was sent.
        first_s: when the first generated text arrived; None without streaming.
        end_s: when the answer or the failure was complete.
        pieces: of the answer, in order.
        prompt_tokens, output_tokens: as the server counted them.
        speculation: the response's `metrics.speculative_decoding`, where there is one.
        failure: class of the failure, or None: `connect`, `timeout`, `http_STATUS`, `cut`, `error_event`, `malformed`,
            `empty`, `no_usage`.
        detail: what the server said about the failure.
    """

    task: str
    planned_s: float
    sent_s: float
    end_s: float
    first_s: float | None = None
    pieces: tuple[Piece, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    speculation: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None
    detail: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_s is None else self.first_s - self.planned_s

    @property
    def e2el_s(self) -> float:
        """End-to-end latency."""
        return self.end_s - self.planned_s

    @property
    def decode_s(self) -> float | None:
        """From the first piece of the answer to the last one."""
        return self.pieces[-1].at_s - self.pieces[0].at_s if self.first_s is not None and self.pieces else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token behind the first; None where nothing can be said."""
        decode_s = self.decode_s
        return decode_s / (self.output_tokens - 1) if decode_s and self.output_tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between successive pieces; a round of speculation brings several tokens in one piece."""
        times = [piece.at_s for piece in self.pieces]
        return [later - earlier for earlier, later in pairwise(times)]
