"""What goes into a decoding stream and what comes out of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from outrider.logprobs import LogprobRows
from outrider.planted import Plant
from outrider.sampling import Form, Rule, SamplingParams

if TYPE_CHECKING:
    from coordinator.request_trace import RequestTrace

CutText = Callable[[Sequence[int]], int | None]
"""Takes the tokens of an emission, in order and once; returns the index of the one that completes a stop string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRequest:
    """One answer to one prompt.

    Attributes:
        prompt_ids: at least one token.
        params: after validation and defaults; `stop_token_ids` holds the end-of-sequence ids unless ignored.
        seed: of all noise, or None for 64 bits from the operating system.
        num_speculative_tokens: drafted tokens per round; 0 turns speculation off, None leaves it to the controller.
        sample_index: which of a request's samples this is, below 2^16.
        prompt_group: open requests of one group, other than 0, have the same prompt; services read it once.
        cache_salt: 64 bits; services share the KV of equal prefixes only where these are equal.
        deadline_s: seconds from `Decoder.open` after which the stream ends in `DeadlineExceeded`.
        cut_text: looks for stop strings, or None.
        planted: an error on purpose.
        logprobs: most probable ids wanted beside each token's log-probability, or None for no log-probabilities.
        synthetic: chance with which a tested slot is accepted, whatever p says, for measuring the system alone; None
            for every request that wants a text.
        prompt_logprobs: the same for the prompt's tokens behind the first.
        trace: of the request that this answers a part of; None if it is not traced.
        prompt_hashes: of the prompt, as `state.prompt_hashes` makes them off the event loop; None makes them at the
            opening.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int | None = None
    rule: Rule = Rule.STANDARD
    form: Form = Form.SPARSE
    num_speculative_tokens: int | None = None
    sample_index: int = 0
    prompt_group: int = 0
    cache_salt: int = 0
    deadline_s: float = 600.0
    cut_text: CutText | None = None
    planted: Plant = Plant.NONE
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    synthetic: float | None = None
    trace: RequestTrace | None = None
    prompt_hashes: array[int] | None = field(default=None, compare=False, repr=False)

    @property
    def draws_dense(self) -> bool:
        """Whether whole rows of q and p travel, because only the standard rule above temperature 0 needs them.

        Both forms emit the same tokens. With log-probabilities it is the sparse one: there the target knows every token
        that may be emitted.
        """
        return self.form is Form.DENSE and self.rejects and self.logprobs is None

    @property
    def rejects(self) -> bool:
        """Whether rounds are accepted by rejection sampling; otherwise drafted tokens must equal the target's own."""
        return self.rule is Rule.STANDARD and not self.params.greedy


class Emission(NamedTuple):
    """Tokens that became part of the answer together.

    Attributes:
        tokens: in order; the last one may be a stop id.
        drafted: parallel; whether the draft proposed the token and the rule accepted it.
        finish_reason: "stop" or "length" with the last tokens, else None.
        stop_token: the stop id that ended the answer, if one did.
        logprobs: parallel to the tokens, where they were asked for.
        prompt_logprobs: of the prompt's tokens from the second on, with the first tokens, where they were asked for.
    """

    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]
    finish_reason: str | None
    stop_token: int | None
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None


@dataclass(slots=True)
class StreamStats:
    """What speculation did for one stream, counted after the cut: tokens behind the end of the answer count nowhere.

    Attributes:
        synthetic: whether slots were accepted at a set rate instead, so that the text means nothing.
        rounds: rounds of any kind; every plain token is one.
        num_spec_steps: rounds with at least one drafted slot.
        num_draft_tokens: drafted slots sent to the target.
        num_tested_tokens: drafted slots that the rule looked at; alpha-hat = accepted / tested.
        num_accepted_draft_tokens: drafted tokens that became part of the answer.
        cached_tokens: tokens of the prompt whose KV the target found.
        acceptance_histogram: entry k counts the speculative rounds with k accepted.
    """

    rule: Rule = Rule.STANDARD
    synthetic: bool = False
    rounds: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_tested_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    cached_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)

    def count(self, drafted: int, tested: int, accepted: int) -> None:
        """Adds one round; a plain one has nothing drafted."""
        self.rounds += 1
        if drafted:
            self.num_spec_steps += 1
            self.num_draft_tokens += drafted
            self.num_tested_tokens += tested
            self.num_accepted_draft_tokens += accepted
            histogram = self.acceptance_histogram
            if accepted >= len(histogram):
                histogram.extend([0] * (accepted + 1 - len(histogram)))
            histogram[accepted] += 1
