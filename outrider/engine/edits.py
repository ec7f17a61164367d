"""What requests do to logits before the temperature: masks, biases, minimum lengths and penalties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.counts import Counts, Ids
from outrider.engine.grammar import Matcher
from outrider.engine.transfer import indices, to_device
from outrider.sampling import SamplingParams


class RowContext(NamedTuple):
    """What one logits row depends on besides the logits.

    Attributes:
        params: the stream's sampling parameters.
        tokens: the stream's tokens, at least as many as `length` (a verify row's includes the slots drafted before it).
        length: tokens before the row's own position, prompt included; those behind it are not looked at.
        prompt_len: how many of them are prompt.
        matcher: follows the stream's grammar, or None where there is none to follow.
        counts: of the stream's ids, kept between steps; None counts anew, for the rows of one call.
    """

    params: SamplingParams
    tokens: Sequence[int]
    length: int
    prompt_len: int
    matcher: Matcher | None = None
    counts: Counts | None = None


def edit(logits: Tensor, rows: Sequence[RowContext]) -> Tensor:
    """A copy of the logits with each request's edits.

    In this order: grammar, allowed ids, biases, banned words, minimum length, penalties. Ids beyond the vocabulary are
    ignored. Penalties follow the usual definitions: repetition (Keskar et al., arXiv 1909.05858) over prompt and text,
    presence and frequency over the generated text only.

    Args:
        logits: [rows, vocab] float32.
        rows: one per row.
    """
    edited = logits.clone()
    _constrain(edited, rows)
    _allow(edited, rows)
    _bias(edited, rows)
    _ban(edited, rows)
    _hold_stops(edited, rows)
    _penalise(edited, rows)
    return edited


class _Points:
    """Entries of the logits matrix, collected row by row and moved to the device in one piece."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._rows: list[Ids] = []
        self._ids: list[Ids] = []
        self._values: list[NDArray[np.float32]] = []

    def add(self, row: int, ids: Ids, values: NDArray[np.floating] | float = 0.0) -> None:
        known = ids < self._vocab
        self._ids.append(ids[known])
        self._rows.append(np.full(len(self._ids[-1]), row))
        self._values.append(np.broadcast_to(np.asarray(values, np.float32), ids.shape)[known])

    def __bool__(self) -> bool:
        return bool(self._rows)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and id of each entry."""
        return to_device(np.concatenate(self._rows), device), to_device(np.concatenate(self._ids), device)

    def places(self, device: torch.device) -> Tensor:
        """Each entry's place in the flat matrix; several times faster to read and write by than a pair of indices."""
        rows, ids = np.concatenate(self._rows), np.concatenate(self._ids)
        return to_device(rows * self._vocab + ids, device)

    def values(self, device: torch.device) -> Tensor:
        return to_device(np.concatenate(self._values), device)


def _constrain(logits: Tensor, rows: Sequence[RowContext]) -> None:
    masks, masked = [], []
    for i, row in enumerate(rows):
        if row.matcher is None:
            continue
        mask = row.matcher.mask(row.tokens[row.prompt_len : row.length], logits.shape[1])
        if mask is not None:
            masks.append(mask)
            masked.append(i)
    if masks:
        index = indices(masked, logits.device)
        logits[index] = logits[index].masked_fill(~to_device(np.stack(masks), logits.device), -math.inf)


def _allow(logits: Tensor, rows: Sequence[RowContext]) -> None:
    allowed = _Points(logits.shape[1])
    masked = []
    for i, row in enumerate(rows):
        if row.params.allowed_token_ids:
            allowed.add(i, np.array(row.params.allowed_token_ids))
            masked.append(i)
    if allowed:
        index = allowed.index(logits.device)
        kept = logits[index]
        logits[indices(masked, logits.device)] = -math.inf
        logits[index] = kept


def _bias(logits: Tensor, rows: Sequence[RowContext]) -> None:
    biased = _Points(logits.shape[1])
    for i, row in enumerate(rows):
        if row.params.logit_bias:
            ids, values = zip(*row.params.logit_bias, strict=True)
            biased.add(i, np.array(ids), np.array(values))
    if biased:
        logits.index_put_(biased.index(logits.device), biased.values(logits.device), accumulate=True)


def _ban(logits: Tensor, rows: Sequence[RowContext]) -> None:
    banned = _Points(logits.shape[1])
    for i, row in enumerate(rows):
        if not row.params.bad_words:
            continue
        longest = max(map(len, row.params.bad_words)) - 1
        before = tuple(row.tokens[max(row.length - longest, 0) : row.length])
        last = {word[-1] for word in row.params.bad_words if _ends_with(before, word[:-1])}
        if last:
            banned.add(i, np.array(sorted(last)), -math.inf)
    if banned:
        logits.index_put_(banned.index(logits.device), banned.values(logits.device))


def _ends_with(tokens: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return not end or tokens[-len(end) :] == end


def _hold_stops(logits: Tensor, rows: Sequence[RowContext]) -> None:
    held = _Points(logits.shape[1])
    for i, row in enumerate(rows):
        if row.params.stop_token_ids and row.length - row.prompt_len < row.params.min_tokens:
            held.add(i, np.array(row.params.stop_token_ids), -math.inf)
    if held:
        logits.index_put_(held.index(logits.device), held.values(logits.device))


def _penalise(logits: Tensor, rows: Sequence[RowContext]) -> None:
    repeated, subtracted = _Points(logits.shape[1]), _Points(logits.shape[1])
    anew: dict[tuple[int, int], Counts] = {}  # The rows of one stream share its token list.
    for i, row in enumerate(rows):
        params = row.params
        if not params.penalised:
            continue
        counts = row.counts or anew.setdefault((id(row.tokens), row.prompt_len), Counts(row.prompt_len))
        counts.reach(row.tokens, row.length)
        if params.repetition_penalty != 1:
            repeated.add(i, counts.known.ids, params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            text = counts.text
            subtracted.add(i, text.ids, params.presence_penalty + params.frequency_penalty * text.counts)
    flat = logits.view(-1)
    if repeated:
        places, penalty = repeated.places(logits.device), repeated.values(logits.device)
        before = flat.index_select(0, places)
        flat.index_copy_(0, places, torch.where(before > 0, before / penalty, before * penalty))
    if subtracted:
        places = subtracted.places(logits.device)
        before = flat.index_select(0, places)
        flat.index_copy_(0, places, before.sub_(subtracted.values(logits.device)))
