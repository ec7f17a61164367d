"""A draft that builds on the target's hidden states, as a cache of one stream's features.

They ride with what goes to and fro anyway: every round asks the target for the rows that the draft will lack, they come
with the verdict, and leave with the next proposal's item, unparsed. Nothing here is ever needed twice: whatever gets
lost, the next round asks for everything from what the draft is known to have, and the target answers from its ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outrider.features import NOT_WANTED, FeatureBlock, FeatureRequest


class Wish(NamedTuple):
    """Features that the target is asked for with a round: which, and from which position on."""

    request: FeatureRequest
    first: int


@dataclass(slots=True)
class FeatureSide:
    """What a stream's draft has and lacks.

    Attributes:
        held: positions below this one have features at the draft, as far as is known.
        wish: of the round in flight; None if it needs none.
        pending: rows that the target has sent and the draft has not been sent.
        missed: whether the last answer lacked the features that it was to bring: the target has no room for them.
    """

    held: int = 0
    wish: Wish | None = None
    pending: FeatureBlock | None = None
    missed: bool = False

    def ask(self, request: FeatureRequest | None) -> None:
        """A round begins; with a request it brings the features that the draft lacks."""
        self.wish = Wish(request, self.held) if request is not None else None

    def received(self, block: FeatureBlock | None, committed: int) -> None:
        """A token was committed; `block` came with it, and what it holds behind the accepted tokens is dropped.

        A wish that was made before the draft lost what it had brings too little, and is made again.
        """
        self.pending = None
        self.missed = block is None and self.wish is not None
        if block is not None and self.wish is not None and self.wish.first <= self.held:
            self.pending = block.before(committed - 1)

    def are_ready(self, committed: int) -> bool:
        """Whether the draft has, or is about to be sent, all features up to the last committed token but one."""
        return self.held >= committed - 1 or (self.pending is not None and self.pending.end == committed - 1)

    def take(self) -> FeatureBlock | None:
        """What leaves with an item for the draft."""
        block, self.pending = self.pending, None
        return block

    def answered(self, cached: int) -> None:
        """The draft holds `cached` tokens, each fed with the feature of the position before it."""
        self.held = max(cached - 1, 0)

    def forget(self) -> None:
        """The draft lost the stream."""
        self.held, self.pending = 0, None


def first_wanted(wish: Wish | None, request: FeatureRequest) -> int:
    """The entry of a round in a message that asks for features of one kind."""
    return wish.first if wish is not None and wish.request == request else NOT_WANTED
