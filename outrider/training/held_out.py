"""Acceptance on answers that were never trained on, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.training.batches import collate
from outrider.training.teacher import Lesson
from outrider.training.unroll import Unroll

_EVERY = 16
_LESSONS_AT_ONCE = 8


def is_held_out(index: int) -> bool:
    """Whether the lesson at this place of its shard is never trained on."""
    return index % _EVERY == 0


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a head would have had accepted; index i is drafted position i + 1.

    Attributes:
        alpha: E[sum min(p, q)] at temperature 1, behind a prefix that was the target's own.
        greedy: Share of rows of greedy answers whose first i + 1 positions are all the target's likeliest ids.
        rows: Rows measured at the first position.
    """

    alpha: tuple[float, ...]
    greedy: tuple[float, ...]
    rows: int

    @property
    def greedy_length(self) -> float:
        """Mean tokens of a greedy round that drafts as many as were measured, the target's own token included."""
        return 1 + sum(self.greedy)

    def __str__(self) -> str:
        alphas = " ".join(f"{a:.3f}" for a in self.alpha)
        return f"alpha {alphas}; greedy length {self.greedy_length:.2f} at gamma {len(self.greedy)}"


@torch.no_grad()
def measure(unroll: Unroll, lessons: Sequence[Lesson], steps: int, device: torch.device) -> Acceptance:
    """Unrolls a head over held-out lessons."""
    alphas: list[list[torch.Tensor]] = [[] for _ in range(steps)]
    survived: list[list[torch.Tensor]] = [[] for _ in range(steps)]
    usable = sorted((one for one in lessons if len(one.top_ids) > 2), key=lambda one: len(one.top_ids))
    for start in range(0, len(usable), _LESSONS_AT_ONCE):
        batch = collate(usable[start : start + _LESSONS_AT_ONCE], device)
        alive = torch.ones(len(batch.rows), int(batch.rows.max()), dtype=torch.bool, device=device)
        for number, step in enumerate(unroll(batch, steps)):
            alphas[number].append(step.alpha)
            alive[step.lessons, step.anchors] &= step.match
            survived[number].append(alive[step.lessons, step.anchors][batch.greedy[step.lessons]])
    means = [float(torch.cat(step).mean()) if step else 0.0 for step in alphas]
    shares = [float(torch.cat(step).float().mean()) if step and sum(map(len, step)) else 0.0 for step in survived]
    return Acceptance(tuple(means), tuple(shares), sum(map(len, alphas[0])))
