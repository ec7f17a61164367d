"""A batch of prompts while the target answers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.training.buffered_attention import GrowingLayer

_ENOUGH_ANSWERED = 0.92  # of a batch; waiting for the few longest answers costs whole passes
_WORTH_COMPACTING = 0.75


class Asked(NamedTuple):
    """One prompt to answer: its ids, and the temperature (0 is greedy)."""

    ids: Sequence[int]
    temperature: float


@dataclass(slots=True)
class Notes:
    """What is collected for one answer: its ids, features of the prompt's end and of each token, top probabilities."""

    ids: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    top_ids: list[Tensor] = field(default_factory=list)
    top_probs: list[Tensor] = field(default_factory=list)
    ended: bool = False


class Flight:
    """The rows of a batch, padded on the left; rows that have ended are dropped when it pays.

    Attributes:
        ids, positions: [rows, new] what the next pass reads.
        cache: Keys and values so far.
        notes: Parallel to the prompts.
    """

    def __init__(self, asked: Sequence[Asked], max_tokens: int, device: torch.device) -> None:
        longest = max(len(one.ids) for one in asked)
        ids = torch.zeros(len(asked), longest, dtype=torch.int64)
        mask = torch.zeros(len(asked), longest + max_tokens, dtype=torch.bool)
        for row, one in enumerate(asked):
            ids[row, longest - len(one.ids) :] = torch.tensor(one.ids)
            mask[row, longest - len(one.ids) :] = True
        self.ids, self._mask = ids.to(device), mask.to(device)
        self.positions = (self._mask[:, :longest].cumsum(1) - 1).clamp(min=0)
        self.cache: Any = Cache(layer_class_to_replicate=GrowingLayer)
        self.notes = [Notes() for _ in asked]
        self._asked = asked
        self._lengths = self._mask[:, :longest].sum(1)
        self._temperatures = torch.tensor([one.temperature for one in asked], device=device)
        self._rows = list(range(len(asked)))
        self._length = longest

    @property
    def mask(self) -> Tensor:
        """bool [rows, positions so far], False on padding."""
        return self._mask[:, : self._length]

    @property
    def going(self) -> list[int]:
        """Rows of the batch whose answers go on."""
        return [place for place, row in enumerate(self._rows) if not self.notes[row].ended]

    @property
    def nearly_all_ended(self) -> bool:
        """Whether too few answers go on to be worth a pass."""
        return len(self.going) <= (1 - _ENOUGH_ANSWERED) * len(self._asked)

    def passed(self, features: Tensor, window: int, stop_ids: frozenset[int]) -> None:
        """Notes the features of a pass: the prompt's last `window` positions, then one token each.

        An answer ends with the pass over its stop id, which was only for its feature.
        """
        for place in self.going:
            note, prompt = self.notes[self._rows[place]], self._asked[self._rows[place]].ids
            kept = min(window, len(prompt)) if not note.ids else 1
            note.features.append(features[place, -kept:].clone())
            note.ended = bool(note.ids) and note.ids[-1] in stop_ids

    def draw(self, logits: Tensor, top_k: int, generator: torch.Generator) -> None:
        """Draws each row's next token, notes it with its distribution at temperature 1, and readies the next pass."""
        top = logits.topk(top_k, dim=-1)
        top_ids = top.indices.int().cpu()
        top_probs = (top.values - logits.logsumexp(-1, keepdim=True)).exp().half().cpu()
        drawn = _draw(logits, self._temperatures, generator)
        tokens, going = drawn.tolist(), self.going
        for place in going:
            note = self.notes[self._rows[place]]
            note.ids.append(tokens[place])
            note.top_ids.append(top_ids[place])
            note.top_probs.append(top_probs[place])
        if len(going) <= _WORTH_COMPACTING * len(self._rows):
            drawn = drawn[self._compact(going)]
        self.ids, self.positions = drawn[:, None], self._lengths[:, None]
        self._lengths = self._lengths + 1
        self._length += 1

    def _compact(self, going: list[int]) -> Tensor:
        kept = torch.tensor(going, device=self._lengths.device)
        for layer in self.cache.layers:
            layer.batch_select_indices(kept)
        self._mask, self._lengths = self._mask[kept], self._lengths[kept]
        self._temperatures = self._temperatures[kept]
        self._rows = [self._rows[place] for place in going]
        return kept


def _draw(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """[rows] ids by inverse CDF at each row's temperature; the argmax where that is 0."""
    drawn = logits.argmax(-1)
    warm = (temperatures > 0).nonzero()[:, 0]
    if len(warm):
        mass = (logits[warm] / temperatures[warm, None]).softmax(-1).cumsum(-1)
        draws = torch.rand(len(warm), 1, generator=generator, device=generator.device).to(mass.device)
        drawn[warm] = torch.searchsorted(mass, draws * mass[:, -1:], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return drawn
