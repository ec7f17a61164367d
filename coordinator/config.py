"""DecoderConfig: what the decoding loop is told at start, complete and checked."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from coordinator.gamma import SizeRange, size_ranges
from outrider.errors import InvalidArgument
from outrider.rpc.credentials import PLAIN, TlsFiles

MAX_GAMMA = 64
"""Drafted tokens per round that any configuration may ask for."""

Resolve = Callable[[str], Awaitable[str]]
"""From the name of a service to the address at which it is now; raises `Unavailable` while there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """
    Attributes:
        target: addresses of the target replicas, at least one; a stream stays with one of them while it is up.
        draft: address of the draft service, or None to decode plainly.
        num_speculative_tokens: drafted tokens per round (gamma), or "auto" to let the controller choose.
        num_speculative_tokens_per_batch_size: `[first, last, gamma]` triples that fix gamma by the number of streams
            being decoded, in place of the controller; empty: not used. Needs "auto".
        max_num_speculative_tokens: what "auto" and requests may ask for at most, from 1 to 64.
        request_timeout_s: deadline of requests that bring none.
        allow_vocab_mismatch: whether a draft with another vocabulary is confined to the agreeing ids, not refused.
        self_draft: whether the target as its own draft is meant, so that no warning is due.
        run_credit: tokens that a plain stream's target may be ahead of the coordinator.
        acceptance_baseline: share of rounds whose first drafted token is accepted when all is well; None learns it.
        tls: files of this client for TLS on both links; without any they are plain text.
        resolve: takes `target` and `draft` for names and finds their addresses before each attempt to connect.
    """

    target: tuple[str, ...]
    draft: str | None = None
    num_speculative_tokens: int | Literal["auto"] = "auto"
    num_speculative_tokens_per_batch_size: tuple[SizeRange, ...] = ()
    max_num_speculative_tokens: int = 8
    request_timeout_s: float = 600.0
    allow_vocab_mismatch: bool = False
    self_draft: bool = False
    run_credit: int = 8
    acceptance_baseline: float | None = None
    tls: TlsFiles = PLAIN
    resolve: Resolve | None = None

    def __post_init__(self) -> None:
        if isinstance(self.target, str) or not self.target:
            raise InvalidArgument("target", "must be a tuple of at least one address")
        _within("max_num_speculative_tokens", self.max_num_speculative_tokens, 1, MAX_GAMMA)
        if self.num_speculative_tokens != "auto":
            _within("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_GAMMA)
        if self.num_speculative_tokens_per_batch_size:
            size_ranges(self.num_speculative_tokens_per_batch_size, MAX_GAMMA)
            if self.num_speculative_tokens != "auto":
                raise InvalidArgument(
                    "num_speculative_tokens_per_batch_size", "goes with num_speculative_tokens = auto only"
                )
        _within("run_credit", self.run_credit, 1, 1024)
        if self.acceptance_baseline is not None and not 0 < self.acceptance_baseline < 1:
            raise InvalidArgument("acceptance_baseline", f"must lie between 0 and 1, got {self.acceptance_baseline}")
        if not 0 < self.request_timeout_s < math.inf:
            raise InvalidArgument("request_timeout_s", f"must be a positive number, got {self.request_timeout_s}")

    @property
    def largest_gamma(self) -> int:
        """Drafted tokens per round that the server or a request may ask for."""
        fixed = 0 if self.num_speculative_tokens == "auto" else self.num_speculative_tokens
        table = (part.gamma for part in self.num_speculative_tokens_per_batch_size)
        return max(fixed, self.max_num_speculative_tokens, *table)


def _within(field: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidArgument(field, f"must be an integer from {low} to {high}, got {value!r}")
