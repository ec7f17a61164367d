"""The noise band: is a difference of two texts a near tie of a device whose rounding depends on the batch?

Asked only where the target's own start-up test found such differences. Plain texts are decoded alone, beside each
other, and many at once, with the log-probabilities of the most probable ids. Where two of those passes stand behind the
same prefix, the lead of the best id over another one should be the same; by how much it changes at most is the band. At
the first differing token of two texts the target is asked for its log-probabilities once more. If the lead of the one
token over the other, noise of the coupled rule included, lies within the band, rounding may have turned it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.noise import Role, exponentials, gumbel_row_keys, gumbel_words, subkey
from outrider.verify.door import Door, Reply, Wish
from outrider.verify.texts import Difference, greedy

TOPS = 20
"""Alternatives that a row shows; the most that a server gives."""

Row = Mapping[int, float]


class Tie(NamedTuple):
    """A difference, looked at.

    Attributes:
        lead: of the plain text's token over the other one, in log-probability with noise; None if the other one is not
            among the most probable ids.
    """

    difference: Difference
    lead: float | None

    def within(self, band: float) -> bool:
        """Whether rounding explains it."""
        return self.lead is not None and abs(self.lead) <= band


async def band(door: Door, prompts: Sequence[str], n: int) -> float:
    """The largest change of a lead between plain passes of different shapes.

    Args:
        prompts: whose greedy texts are decoded alone, all at once, and `n` times at once.
        n: answers to one request.
    """
    wishes = [wish._replace(logprobs=TOPS) for wish in greedy(prompts)]
    alone = [await door.ask(wish) for wish in wishes]
    together = await door.all(wishes)
    crowded = await door.all([wish._replace(n=n) for wish in wishes])
    return max(
        (
            change(one, other, sample)
            for one, *others in zip(alone, together, crowded, strict=True)
            for other in others
            for sample in range(len(other.texts))
        ),
        default=0.0,
    )


def change(one: Reply, other: Reply, sample: int) -> float:
    """The largest change of a lead between the first text of `one` and a text of `other`, as far as they are alike."""
    largest = 0.0
    pairs = zip(one.texts[0], other.texts[sample], one.tops[0], other.tops[sample], strict=False)
    for token, its, row, others in pairs:
        both = row.keys() & others.keys()
        if both:
            best = max(both, key=lambda known: (row[known], -known))
            largest = max(largest, *(abs(row[known] - row[best] - others[known] + others[best]) for known in both))
        if token != its:
            break
    return largest


async def look(door: Door, difference: Difference) -> Tie:
    """Asks for the row at which two texts part."""
    prefix = difference.prompt + difference.plain[: difference.token]
    wish = Wish(prompt=prefix, max_tokens=1, temperature=0.0, logprobs=TOPS, ends=False)
    (row,) = (await door.ask(wish)).tops[0]
    return Tie(difference, lead(difference, row))


def lead(difference: Difference, row: Row) -> float | None:
    """How far the plain token is ahead in what the rule maximises: log p, or log p - log e under the coupled rule."""
    at = difference.token
    if at >= min(len(difference.plain), len(difference.speculative)):
        return None  # one text ends where the other goes on
    ids = [difference.plain[at], difference.speculative[at]]
    if not all(token in row for token in ids):
        return None
    scores = np.array([row[token] for token in ids])
    if difference.wish.temperature > 0:
        scores -= np.log(_exponentials(difference, ids))
    return float(scores[0] - scores[1])


def _exponentials(difference: Difference, ids: Sequence[int]) -> NDArray[np.float64]:
    """The unit exponentials e of some ids at the differing position; smaller ones win."""
    keys = gumbel_row_keys(
        np.array([subkey(difference.wish.seed or 0, Role.GUMBEL)], np.uint64),
        np.array([len(difference.prompt) + difference.token], np.uint32),
        np.array([difference.sample], np.uint32),
    )
    return exponentials(gumbel_words(keys, np.array(ids)))[0]
