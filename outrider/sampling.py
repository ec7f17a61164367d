"""SamplingParams: what a request may ask of the sampler, validated once and frozen.

The same object crosses both links (inside StreamOpen), so that the draft can mirror what the target does.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from outrider.errors import InvalidArgument
from outrider.grammar import Grammar

GREEDY_BELOW = 1e-4
"""A temperature below this is temperature 0: dividing logits by less overflows half precision and changes no argmax."""

_SINGLE = struct.Struct("<f")
"""Numbers cross the wire in single precision."""


class Rule(IntEnum):
    """How a round is accepted (exact in every case)."""

    STANDARD = 1
    """Rejection sampling with a residual draw: highest acceptance."""
    COUPLED = 2
    """Shared Gumbel noise: the text does not depend on the draft at all."""


class Form(IntEnum):
    """What crosses the wire under the standard rule."""

    SPARSE = 1
    """Integer-count q, p(x), one recovered candidate per slot and a bonus: O(gamma) bytes."""
    DENSE = 2
    """Whole rows of q and p; the coordinator computes everything. The textbook, and the tests' oracle."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one stream, after defaults.

    Attributes:
        temperature: 0 is greedy (ties: lowest id); at most 100.
        top_k: 0 or -1 means all ids.
        top_p: in (0, 1]; the smallest set of ids whose mass reaches it.
        min_p: in [0, 1]; ids below min_p x the largest probability are dropped.
        presence_penalty: in [-2, 2], subtracted once from every id generated before.
        frequency_penalty: in [-2, 2], subtracted per occurrence in the generated text.
        repetition_penalty: > 0; divides positive and multiplies negative logits of ids seen in prompt or text.
        logit_bias: (id, bias) pairs, biases in [-100, 100].
        allowed_token_ids: if not empty, no other id is ever drawn.
        min_tokens: stop ids cannot be drawn before this many generated tokens.
        stop_token_ids: ids that end the stream (end-of-sequence ids included unless ignored).
        max_tokens: generated tokens at most.
        bad_words: token sequences that are never completed: where the tokens before (prompt included) end with all of
            one but its last token, that one cannot be drawn.
        grammar: what the generated text must match as a whole, or None; `stop_token_ids` then holds the
            end-of-sequence ids.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 100.0)
        if self.top_k < -1:
            raise InvalidArgument("top_k", f"must be -1, 0 or positive, got {self.top_k}")
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidArgument("top_p", "must be above 0 (use temperature 0 for greedy decoding)")
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 1e-3, 100.0)
        for token_id, bias in self.logit_bias:
            if token_id < 0:
                raise InvalidArgument("logit_bias", f"token id {token_id} is negative")
            _in_range("logit_bias", bias, -100.0, 100.0)
        for name, ids in (("allowed_token_ids", self.allowed_token_ids), ("stop_token_ids", self.stop_token_ids)):
            if any(token_id < 0 for token_id in ids):
                raise InvalidArgument(name, "token ids cannot be negative")
        if any(not word or min(word) < 0 for word in self.bad_words):
            raise InvalidArgument("bad_words", "a word needs at least one token, and ids cannot be negative")
        if self.max_tokens < 1:
            raise InvalidArgument("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidArgument(
                "min_tokens", f"must be from 0 to max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )

    @cached_property
    def greedy(self) -> bool:
        """Whether the distribution is one-hot at the argmax: temperature 0, or top_k = 1."""
        # As the services read it: between two parts that disagree, a temperature at the bound would be neither.
        (temperature,) = _SINGLE.unpack(_SINGLE.pack(self.temperature))
        return temperature < GREEDY_BELOW or self.top_k == 1

    @cached_property
    def plain(self) -> bool:
        """Whether logits need no edit before temperature: grammar, bias, mask, banned word, penalty, minimum length."""
        edits = self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens or self.penalised
        return not edits and self.grammar is None

    @cached_property
    def penalised(self) -> bool:
        """Whether any penalty depends on the tokens seen so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _in_range(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidArgument(field, f"must be a number from {low:g} to {high:g}, got {value}")
