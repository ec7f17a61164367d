"""Padded batches of lessons for the unrolled loss."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.training.teacher import Lesson


@dataclass(frozen=True, slots=True)
class Batch:
    """Some lessons side by side. M is the longest answer, N the most rows with a feature, K the kept probabilities.

    Attributes:
        features: bfloat16 [lessons, N, layers * hidden], from each lesson's first feature on.
        next_ids: int64 [lessons, N] the token behind each of those positions.
        offsets: int64 [lessons] where the last position of the prompt lies among them: the first row that drafts.
        rows: int64 [lessons] rows that draft at step 0; each further step has one fewer.
        answer: int64 [lessons, M].
        top_ids, top_probs: [lessons, M, K] the target's distribution that drew each answer token.
        greedy: bool [lessons] whether the answer is what greedy decoding gives.
        texts: int64 [lessons, longest] prompts and answers.
        prompts, lengths: int64 [lessons] tokens of the prompt, and of both.
    """

    features: Tensor
    next_ids: Tensor
    offsets: Tensor
    rows: Tensor
    answer: Tensor
    top_ids: Tensor
    top_probs: Tensor
    greedy: Tensor
    texts: Tensor
    prompts: Tensor
    lengths: Tensor


def collate(lessons: Sequence[Lesson], device: torch.device) -> Batch:
    """Pads lessons (each with an answer of two tokens or more) into one batch."""
    answers = [one.ids[one.prompt_tokens :].long() for one in lessons]
    rows = torch.tensor([len(answer) - 1 for answer in answers])
    offsets = torch.tensor([one.prompt_tokens - 1 - one.start for one in lessons])
    # The last two positions of an answer draft nothing that the target has judged.
    features = [one.features[: offset + row] for one, offset, row in zip(lessons, offsets, rows, strict=True)]
    next_ids = [one.ids[one.start + 1 :][: len(f)].long() for one, f in zip(lessons, features, strict=True)]
    greedy = torch.tensor([_is_greedy(one, answer) for one, answer in zip(lessons, answers, strict=True)])
    padded = (
        pad_sequence(features, batch_first=True),
        pad_sequence(next_ids, batch_first=True),
        offsets,
        rows,
        pad_sequence(answers, batch_first=True),
        pad_sequence([one.top_ids for one in lessons], batch_first=True).long(),
        pad_sequence([one.top_probs for one in lessons], batch_first=True).float(),
        greedy,
        pad_sequence([one.ids.long() for one in lessons], batch_first=True),
        torch.tensor([one.prompt_tokens for one in lessons]),
        torch.tensor([len(one.ids) for one in lessons]),
    )
    return Batch(*(tensor.to(device) for tensor in padded))


def _is_greedy(one: Lesson, answer: Tensor) -> bool:
    """Whether every token is a likeliest one; there may be several, for bfloat16 logits are often equal."""
    likeliest = one.top_probs >= one.top_probs[:, :1]
    return bool((likeliest & (one.top_ids == answer[:, None])).any(1).all())


def batches(lessons: Sequence[Lesson], rows: int, drawn: random.Random, device: torch.device) -> Iterator[Batch]:
    """All the lessons once, in batches of about `rows` drafting rows, lessons of similar length together."""
    usable = [one for one in lessons if len(one.top_ids) >= 3]
    usable.sort(key=lambda one: (len(one.top_ids), drawn.random()))
    groups: list[list[Lesson]] = [[]]
    for one in usable:
        if groups[-1] and (len(groups[-1]) + 1) * len(one.top_ids) > rows:
            groups.append([])
        groups[-1].append(one)
    drawn.shuffle(groups)
    for group in groups:
        if group:
            yield collate(group, device)
