"""A round as the target sees it, and its verdict on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.counts import Counts
from outrider.engine.grammar import Matcher
from outrider.seam import StreamOpen
from target_service.proposal import Proposal

F32 = NDArray[np.float32]
U32 = NDArray[np.uint32]

NO_F32 = np.empty(0, np.float32)
NO_U32 = np.empty(0, np.uint32)


class Round(NamedTuple):
    """A round to be judged.

    Attributes:
        opened: the stream's parameters and keys.
        tokens: its tokens, the fed drafted ones included.
        committed: committed length at the start of the round.
        proposal: the slots.
        matcher: follows the stream's grammar, if it has one.
        counts: of the stream's ids, if its parameters penalise any.
    """

    opened: StreamOpen
    tokens: Sequence[int]
    committed: int
    proposal: Proposal
    matcher: Matcher | None = None
    counts: Counts | None = None

    @property
    def rows(self) -> int:
        """Logits rows of the round."""
        return len(self.proposal.x) + 1


class Verdict(NamedTuple):
    """What goes back for a round of m answered slots.

    Attributes:
        p: float32 [m], p_i(x_i); zeros where the rule does not need it.
        emit: uint32 [m], the token emitted if the slot is the first one rejected.
        bonus: the token of the row behind the last slot; any id where the last slot is blocked.
        dense_p: float32 [(m + 1) x vocab] in the dense form, else empty.
    """

    p: F32
    emit: U32
    bonus: int
    dense_p: F32 = NO_F32
