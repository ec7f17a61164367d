"""The pair to try next, for the cards that are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.local.devices import Card
from outrider.local.layout import GIB

_HEADROOM = 1.25
"""Weights times this leaves room for KV and workspace."""


class Pair(NamedTuple):
    """An ungated target and a draft over its vocabulary; sizes of the bf16 weights in bytes."""

    target: str
    target_bytes: int
    draft: str
    draft_bytes: int


PAIRS = (
    Pair("Qwen/Qwen3-32B", int(61.0 * GIB), "Qwen/Qwen3-0.6B", int(1.4 * GIB)),
    Pair("Qwen/Qwen3-14B", int(27.5 * GIB), "Qwen/Qwen3-0.6B", int(1.4 * GIB)),
    Pair("Qwen/Qwen3-8B", int(15.3 * GIB), "Qwen/Qwen3-0.6B", int(1.4 * GIB)),
    Pair("Qwen/Qwen3-4B", int(7.5 * GIB), "Qwen/Qwen3-0.6B", int(1.4 * GIB)),
    Pair("Qwen/Qwen3-1.7B", int(3.8 * GIB), "Qwen/Qwen3-0.6B", int(1.4 * GIB)),
)
"""Largest target first."""


def command(cards: Sequence[Card]) -> str | None:
    """The `outrider up` command for the largest pair that fits: target on the freest card, draft on the smallest other.

    None where no pair fits.
    """
    if not cards:
        return None
    target = max(cards, key=lambda card: card.free_bytes)
    others = [card for card in cards if card is not target]
    for pair in PAIRS:
        drafts = [card for card in others if card.free_bytes >= _HEADROOM * pair.draft_bytes]
        draft = min(drafts, key=lambda card: card.free_bytes, default=target)
        needed = pair.target_bytes + (pair.draft_bytes if draft is target else 0)
        if target.free_bytes >= _HEADROOM * needed:
            return (
                f"outrider up --target {pair.target} --draft {pair.draft} "
                f"--target-device {target.index} --draft-device {draft.index}"
            )
    return None
