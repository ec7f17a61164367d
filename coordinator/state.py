"""The state of one decoding stream: the committed tokens, the round in flight, and what each service holds of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

from coordinator.feature_side import FeatureSide
from coordinator.request import DecodingRequest, StreamStats
from outrider.noise import Role, subkey
from outrider.sampling import Form, Rule
from outrider.seam import F32, U16, U32, StreamOpen, prefix_hash


class Phase(Enum):
    """Where a stream is in its round."""

    OPENED = auto()
    """Between rounds: nothing is in flight that the next token depends on."""
    DRAFTING = auto()
    """A proposal has been asked for."""
    VERIFYING = auto()
    """A proposal was received; it stays the round's proposal until the target has answered, whatever fails."""
    RUNNING = auto()
    """gamma = 0: the target decodes alone until its credit is used up."""
    CLOSED = auto()


class Keys(NamedTuple):
    """One 64-bit subkey per role; no service gets another's."""

    draft: int
    accept: int
    emit: int
    gumbel: int

    @classmethod
    def from_seed(cls, seed: int) -> Keys:
        return cls(*(subkey(seed, role) for role in (Role.DRAFT, Role.ACCEPT, Role.EMIT, Role.GUMBEL)))


class Proposal(NamedTuple):
    """x_1 .. x_gamma and their q, exactly as the draft shipped them; the columns are those of `seam.Slots`."""

    draft_ids: U32
    own_counts: U16
    support_sizes: U16
    q_ids: U32
    q_counts: U16
    dense_q: F32
    draft_cached: int
    """Tokens whose KV the draft held after drafting, drafted ones included."""

    @property
    def slots(self) -> int:
        return len(self.draft_ids)


class Outstanding(NamedTuple):
    """The one unanswered item of a stream on a link; a reply counts only if it echoes both numbers."""

    generation: int
    committed: int


@dataclass(slots=True)
class Side:
    """A service as a cache of this stream's committed tokens.

    Attributes:
        generation: grows whenever an item is given up or sent anew.
        opened: whether the service has been sent the `StreamOpen`.
        held: committed tokens that it has, as far as is known; items start there.
        last: the item posted last, answered or not.
    """

    generation: int = 0
    opened: bool = False
    held: int = 0
    outstanding: Outstanding | None = None
    last: Outstanding | None = None

    def answers(self, generation: int, committed: int) -> bool:
        """Whether a reply with this echo answers the outstanding item."""
        return self.outstanding == (generation, committed)

    def give_up(self, held: int | None = None) -> None:
        """Late answers to what was outstanding no longer count; `held` corrects what the service is known to hold."""
        self.generation += 1
        self.outstanding = None
        if held is not None:
            self.held = held

    def forget(self) -> None:
        """The service lost the stream: the next item opens it again with all committed tokens."""
        self.give_up(held=0)
        self.opened = False


@dataclass(slots=True)
class StreamState:
    """Everything the loop knows about one stream. Only `round_end.commit` edits `tokens`.

    Attributes:
        tokens: prompt and committed answer; the only truth, of which both services are caches.
        hashes: `prefix_hash` of the first i tokens, for every i up to and including all of them.
        fork_of: stream with the same prompt, of which services take the KV of this one's; None without one.
        proposal: of the round in flight, from its arrival to its verdict.
        run_end: committed length at which the credit of the present plain run is used up.
        asked: slots that the round in flight asked for.
        features: of the target, for a draft that builds on them.
    """

    stream_id: int
    request: DecodingRequest
    keys: Keys
    tokens: list[int]
    hashes: array[int]
    stats: StreamStats
    fork_of: int | None = None
    phase: Phase = Phase.OPENED
    proposal: Proposal | None = None
    run_end: int = 0
    asked: int = 0
    draft: Side = field(default_factory=Side)
    target: Side = field(default_factory=Side)
    features: FeatureSide = field(default_factory=FeatureSide)

    @property
    def committed(self) -> int:
        return len(self.tokens)

    def forget_draft(self) -> None:
        """The draft lost the stream."""
        self.draft.forget()
        self.features.forget()

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)


def new_stream(stream_id: int, request: DecodingRequest, seed: int) -> StreamState:
    """A stream before its first round; `seed` is the request's or random."""
    return StreamState(
        stream_id=stream_id,
        request=request,
        keys=Keys.from_seed(seed),
        tokens=list(request.prompt_ids),
        hashes=prompt_hashes(request.prompt_ids) if request.prompt_hashes is None else request.prompt_hashes[:],
        stats=StreamStats(rule=request.rule, synthetic=request.synthetic is not None),
    )


def prompt_hashes(tokens: Sequence[int]) -> array[int]:
    """`prefix_hash` of every beginning of a prompt, the empty one first; a second for some million tokens."""
    hashes = array("Q", [0])
    extend_hashes(hashes, tokens)
    return hashes


def extend_hashes(hashes: array[int], tokens: Sequence[int]) -> None:
    """Rolls the prefix hash over further tokens, keeping every step."""
    value = hashes[-1]
    for token in tokens:
        value = prefix_hash([token], value)
        hashes.append(value)


def open_for_draft(state: StreamState, deadline_ms: int) -> StreamOpen:
    """What the draft must know of a stream: no accept or emit key."""
    coupled = state.request.rule is Rule.COUPLED
    keys = state.keys
    return _open(state, deadline_ms, draft_key=0 if coupled else keys.draft, gumbel_key=keys.gumbel if coupled else 0)


def open_for_target(state: StreamState, deadline_ms: int) -> StreamOpen:
    """What the target must know of a stream: no accept or draft key."""
    coupled = state.request.rule is Rule.COUPLED
    keys = state.keys
    opening = _open(state, deadline_ms, emit_key=0 if coupled else keys.emit, gumbel_key=keys.gumbel if coupled else 0)
    return replace(opening, logprobs=state.request.logprobs, prompt_logprobs=state.request.prompt_logprobs)


def _open(
    state: StreamState, deadline_ms: int, *, draft_key: int = 0, emit_key: int = 0, gumbel_key: int = 0
) -> StreamOpen:
    request = state.request
    return StreamOpen(
        stream_id=state.stream_id,
        prompt_length=len(request.prompt_ids),
        params=request.params,
        rule=request.rule,
        form=Form.DENSE if request.draws_dense else Form.SPARSE,
        draft_key=draft_key,
        emit_key=emit_key,
        gumbel_key=gumbel_key,
        sample_index=request.sample_index,
        fork_of=state.fork_of,
        cache_salt=request.cache_salt,
        deadline_ms=deadline_ms,
        planted=request.planted,
        traceparent=request.trace.traceparent if request.trace is not None else "",
    )
