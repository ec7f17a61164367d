"""`outrider demo`: the same prompt with and without speculation, side by side in one run.

The first answer of each mode warms caches and is not timed. Then the modes alternate, so that a slow moment of the
machine hits both; the speed-up is the ratio of the medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.client import Answer, Client, Piece, request
from outrider.divergence import Divergence, first_difference, measure
from outrider.v1.coordinator_pb2 import GenerateRequest

PROMPT = (
    "Here is a notice from a harbour office:\n\n"
    '"The ferry to Gull Island leaves from pier three at nine in the morning and at four in the afternoon. '
    "The crossing takes forty minutes. Tickets are sold on board. In strong wind the afternoon ferry is cancelled, "
    "and the morning ferry returns at once. Bicycles travel free of charge, but dogs need a ticket of their own. "
    'The last ferry back leaves Gull Island at six in the evening."\n\n'
    "Repeat the notice word for word, and then list its four most important facts."
)

_TIMED_PAIRS = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both modes on one prompt; rates are medians over the timed answers."""

    speculative: Answer
    tokens_per_s: float
    tokens_per_s_plain: float
    divergence: Divergence | None

    @property
    def text_identical(self) -> bool:
        return self.divergence is None

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.tokens_per_s_plain if self.tokens_per_s_plain else 0.0


def compare(
    client: Client,
    target: str,
    *,
    max_tokens: int,
    show: Callable[[Iterable[Piece]], None],
    step: Callable[[str], None],
) -> Comparison:
    """Answer `PROMPT` at temperature 0, plainly and by speculation, alternating.

    Args:
        target: address of the target service, asked about texts that differ.
        show: consumes the pieces of the answer that is shown while it streams.
        step: told before each stage.
    """
    step("plain decoding, the target alone")
    plain = [_answer(client, max_tokens, speculate=False)]
    step("speculative decoding, as it streams")
    speculative = [Answer()]
    show(client.generate(_request(max_tokens, speculate=True), speculative[0]))
    step(f"{_TIMED_PAIRS} more answers of each, in turn, for the clock")
    for _ in range(_TIMED_PAIRS):
        plain.append(_answer(client, max_tokens, speculate=False))
        speculative.append(_answer(client, max_tokens, speculate=True))
    return Comparison(
        speculative=speculative[-1],
        tokens_per_s=statistics.median(answer.tokens_per_s for answer in speculative[1:]),
        tokens_per_s_plain=statistics.median(answer.tokens_per_s for answer in plain[1:]),
        divergence=_divergence(target, plain[0], [*plain, *speculative]),
    )


def _divergence(target: str, reference: Answer, answers: Iterable[Answer]) -> Divergence | None:
    """The first difference of any answer from the reference, with what the target says of it."""
    for answer in answers:
        token = first_difference(reference.token_ids, answer.token_ids)
        if token is not None:
            return measure(target, reference.prompt_token_ids, reference.token_ids, token)
    return None


def _request(max_tokens: int, *, speculate: bool) -> GenerateRequest:
    return request(
        PROMPT, chat=True, max_tokens=max_tokens, temperature=0.0, speculate=speculate, return_prompt_token_ids=True
    )


def _answer(client: Client, max_tokens: int, *, speculate: bool) -> Answer:
    answer = Answer()
    for _ in client.generate(_request(max_tokens, speculate=speculate), answer):
        pass
    return answer
