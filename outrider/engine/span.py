"""Span: what one stream contributes to a step. Free of torch, like all that only accounts for streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """What one stream contributes to a step.

    Attributes:
        stream_id: The stream.
        tokens: Ids fed, at positions start .. start + len - 1.
        start: Positions [0, start) have valid KV.
        wanted: Logits are wanted for the last `wanted` of the tokens, 0 .. len.
        blocks: KV blocks covering start + len positions.
        prompt_len: Length of the prompt in tokens.
        committed: Committed length when the round began.
        dropped: Positions before the start that have no KV any more, a multiple of the block size: position t lies
            where t - dropped would without them.
    """

    stream_id: int
    tokens: Sequence[int]
    start: int
    wanted: int
    blocks: Sequence[int]
    prompt_len: int
    committed: int
    dropped: int = 0
