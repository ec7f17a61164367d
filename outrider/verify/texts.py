"""Texts with and without speculation, id by id: at temperature 0, and under the coupled rule at temperature 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.divergence import first_difference
from outrider.verify.door import Door, Wish

MAX_TOKENS = 48
_SEED = 20_230_201


class Difference(NamedTuple):
    """Two texts that should be one.

    Attributes:
        wish: what was asked for, without speculation.
        prompt: its ids.
        sample: which of the request's samples.
        plain, speculative: the ids of each.
        token: index of the first one that differs.
    """

    wish: Wish
    prompt: tuple[int, ...]
    sample: int
    plain: tuple[int, ...]
    speculative: tuple[int, ...]
    token: int


class Equality(NamedTuple):
    """How many of the compared texts are equal, what was drafted for them, and those that differ."""

    equal: int
    compared: int
    drafted: int
    differences: tuple[Difference, ...]


def greedy(prompts: Sequence[str]) -> list[Wish]:
    """One text of each prompt."""
    return [Wish(prompt=prompt, max_tokens=MAX_TOKENS, temperature=0.0) for prompt in prompts]


def coupled(prompts: Sequence[str], n: int) -> list[Wish]:
    """`n` texts of each prompt, each under a seed of its own."""
    return [
        Wish(prompt=prompt, max_tokens=MAX_TOKENS, temperature=1.0, method="coupled", seed=_SEED + index, n=n)
        for index, prompt in enumerate(prompts)
    ]


async def equality(door: Door, wishes: Sequence[Wish], gamma: int) -> Equality:
    """Asks for everything without and with `gamma` drafted tokens per round."""
    asked = [wish._replace(gamma=drafted) for drafted in (0, gamma) for wish in wishes]
    answers = await door.all(asked)
    plain, speculative = answers[: len(wishes)], answers[len(wishes) :]
    differences, compared = [], 0
    for wish, one, other in zip(wishes, plain, speculative, strict=True):
        for sample, (ids, others) in enumerate(zip(one.texts, other.texts, strict=True)):
            compared += 1
            token = first_difference(ids, others)
            if token is not None:
                differences.append(Difference(wish, one.prompt, sample, ids, others, token))
    drafted = sum(answer.drafted for answer in speculative)
    return Equality(compared - len(differences), compared, drafted, tuple(differences))
