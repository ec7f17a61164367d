"""Requests at random, of every kind that must not change what is said: lengths, gammas, stops, samples, cancels."""

from __future__ import annotations

import random
from typing import NamedTuple

from outrider.client import request
from outrider.v1 import coordinator_pb2

BLOCK = 16
"""Tokens in a KV block on the gather path."""
GAMMAS = (0, 1, 4, BLOCK - 1, BLOCK, BLOCK + 1, 20, None)
LARGEST_GAMMA = 20
IDS = (1, 257)
"""Ids of the tokenizer that are bytes: from, and one behind the last."""
LONGEST_PROMPT, LONGEST_ANSWER, MOST_SAMPLES = 150, 96, 4


class Drawn(NamedTuple):
    """One request.

    Attributes:
        message: as the coordinator gets it.
        leaves_after: tokens after which the client goes away; None stays to the end.
    """

    message: coordinator_pb2.GenerateRequest
    leaves_after: int | None


def draw(count: int, seed: int) -> list[Drawn]:
    """The same requests for the same seed."""
    dice = random.Random(seed)
    beginnings = [_ids(dice, length) for length in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK, 5 * BLOCK)]
    return [_one(dice, beginnings) for _ in range(count)]


def _one(dice: random.Random, beginnings: list[list[int]]) -> Drawn:
    prompt = _ids(dice, round(LONGEST_PROMPT ** dice.random()))
    if dice.random() < 0.6:
        prompt = dice.choice(beginnings) + prompt[: dice.randrange(40)]
    max_tokens = round(LONGEST_ANSWER ** dice.random()) if dice.random() < 0.5 else dice.randint(1, LONGEST_ANSWER)
    greedy = dice.random() < 0.4
    message = request(
        prompt,
        max_tokens=max_tokens,
        temperature=0.0 if greedy else 1.0,
        seed=None if greedy else dice.getrandbits(63),
        rule=None if greedy else "coupled",
        num_speculative_tokens=dice.choice(GAMMAS),
        n=dice.randint(2, MOST_SAMPLES) if dice.random() < 0.1 else None,
        stop=[_text(dice) for _ in range(dice.randrange(1, 5))] if dice.random() < 0.4 else (),
    )
    if dice.random() < 0.3:
        message.params.stop_token_ids.extend(_ids(dice, dice.randrange(1, 9)))
    if dice.random() < 0.3:
        message.params.min_tokens = dice.randint(1, max_tokens)
    message.ignore_eos = dice.random() < 0.2
    if dice.random() < 0.1:
        message.params.frequency_penalty = 0.5
        message.params.repetition_penalty = 1.2
    if not greedy and dice.random() < 0.2:
        message.params.top_k = dice.choice([2, 20])
        message.params.top_p = 0.9
    leaves_after = dice.randrange(max_tokens) if dice.random() < 0.15 else None
    return Drawn(message, leaves_after)


def _ids(dice: random.Random, length: int) -> list[int]:
    return [dice.randrange(*IDS) for _ in range(length)]


def _text(dice: random.Random) -> str:
    return "".join(chr(dice.randrange(33, 127)) for _ in range(dice.choice([1, 1, 2])))
