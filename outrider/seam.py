"""The seam between the parts: batches as columns over many streams.

Each dataclass mirrors one protobuf message of `proto/outrider/v1`; `outrider.rpc.codec` converts and validates at the
edge, and nothing behind it knows protobuf. All arrays are one-dimensional unless said otherwise; "flat" columns
concatenate the items' variable-length parts in item order. Tokens are ids of the target's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import Status
from outrider.features import NO_FEATURES, FeatureRequest, Features
from outrider.logprobs import NO_LOGPROBS, Logprobs
from outrider.planted import Plant
from outrider.sampling import Form, Rule, SamplingParams

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]


class Cut(IntEnum):
    """Why fewer slots were verified than sent."""

    NONE = 0
    MALFORMED_Q = 1
    """The declared q is not a distribution; judged from q alone, so cutting there is exact."""
    LYING_DRAFT = 2
    """The drawn token contradicts the declared q; the draft is detached, no law can be promised for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOpen:
    """What a service must know once about a decoding stream.

    Attributes:
        stream_id: random 64 bits, never re-used.
        fork_of: stream whose cached prefix this one shares (n > 1), or None.
        prompt_length: prompt tokens; the tokens themselves travel in the first item.
        keys: subkeys by role, only those this service may know: `draft_key` for the draft, `emit_key` for the
            target, `gumbel_key` for both under the coupled rule. 0 where not given.
        sample_index: which of a request's n samples this is; enters every noise counter.
        logprobs: top alternatives wanted per emitted token, or None.
        prompt_logprobs: top alternatives wanted per prompt token behind the first, or None.
        deadline_ms: milliseconds from now after which the stream may be dropped.
        planted: an error on purpose; refused by services that were not started to allow it.
        cache_salt: 64 bits; streams find one another's cached prefixes only where these are equal.
        traceparent: W3C trace context of the request, empty where it is not traced.
    """

    stream_id: int
    prompt_length: int
    params: SamplingParams
    rule: Rule = Rule.STANDARD
    form: Form = Form.SPARSE
    draft_key: int = 0
    emit_key: int = 0
    gumbel_key: int = 0
    sample_index: int = 0
    fork_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    deadline_ms: int = 600_000
    planted: Plant = Plant.NONE
    cache_salt: int = 0
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """The columns every request item has, on both links.

    Attributes:
        stream_ids: [n] u64.
        generations: [n] u32, grows whenever the coordinator gives up on an unanswered item.
        committed_lengths: [n] u32, prompt included.
        bases: [n] u32, position of the first token sent with the item.
        prefix_hashes: [n] u64, `prefix_hash` over tokens [0, base).
        token_counts: [n] u32.
        tokens: flat u32; the committed tokens from `base` on that the service may lack.
    """

    stream_ids: U64
    generations: U32
    committed_lengths: U32
    bases: U32
    prefix_hashes: U64
    token_counts: U32
    tokens: U32

    def __len__(self) -> int:
        return len(self.stream_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Drafted slots with the q they were drawn from, flat over items.

    Attributes:
        per_item: [n] u8 slots of each item.
        draft_ids: flat u32, one per slot.
        own_counts: flat u16, count of the drafted id minus 1 (65,535 for a one-hot q).
        support_sizes: flat u16, ids in q's support; 0 is one-hot at the drafted id.
        q_ids: flat u32 bytes-compatible column, strictly rising within a slot.
        q_counts: flat u16, counts minus 1; a slot's counts sum to 2^16.
        dense_q: flat f32 rows [slots x vocabulary], or empty (only in the dense form).
    """

    per_item: U8
    draft_ids: U32
    own_counts: U16
    support_sizes: U16
    q_ids: U32
    q_counts: U16
    dense_q: F32


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeBatch:
    """Coordinator -> draft.

    Attributes:
        slots: [n] u8 slots wanted (0: only bring the KV up to date).
        deadlines_ms: [n] u16, time after which the draft returns what is finished; 0 = none.
        least_survivals: [n] u16, in 65,535ths: the draft stops before a slot, other than the first, that it gives less
            than this chance of being accepted together with all slots before it; 0 = never.
        features: of the target, at committed positions; only for drafts that ask for them.
    """

    items: Items
    slots: U8
    deadlines_ms: U16
    least_survivals: U16
    opens: tuple[StreamOpen, ...] = ()
    closed: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    features: Features = NO_FEATURES


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBatch:
    """Coordinator -> target.

    Attributes:
        slots: the drafted slots to verify, as the draft shipped them.
        runs: [n] u16; for an item without slots: plain tokens to draw one after the other (at least 1).
        features_from: [n] u32, first position whose features are wanted with the verdict (`features.NOT_WANTED`: none);
            looked at only where there is a `feature_request`.
        feature_request: which hidden states they are.
    """

    items: Items
    slots: Slots
    runs: U16
    opens: tuple[StreamOpen, ...] = ()
    closed: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    features_from: U32 = field(default_factory=lambda: np.empty(0, np.uint32))
    feature_request: FeatureRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of a response went, in milliseconds, and the step it rode in."""

    queue_ms: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    total_ms: float = 0.0
    step_streams: int = 0
    step_tokens: int = 0


class Note(NamedTuple):
    """What a service did for a stream since its last answer, beside answering.

    Attributes:
        prefix_tokens: tokens of the prompt whose KV was found when the stream was taken in.
        preemptions: times that the stream lost its KV to another one.
    """

    prefix_tokens: int = 0
    preemptions: int = 0


NO_NOTE = Note()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """The columns every response item has: the echo that compare-and-set needs, and what the service holds.

    Attributes:
        stream_ids, generations, committed_lengths: echo of the request item (for a plain run: of that token's round).
        statuses: [n] u8, values of `Status`.
        cached_lengths: [n] u32 tokens whose KV the service holds and can cut to.
        errors: item index -> message, for items whose status is not OK.
        notes: item index -> note, for the few items that have one.
    """

    stream_ids: U64
    generations: U32
    committed_lengths: U32
    statuses: U8
    cached_lengths: U32
    errors: dict[int, str] = field(default_factory=dict)
    notes: dict[int, Note] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.stream_ids)

    def status(self, index: int) -> Status:
        return Status(int(self.statuses[index]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalBatch:
    """Draft -> coordinator: `slots.per_item` is what was drafted, fewer than wanted when the deadline passed."""

    replies: Replies
    slots: Slots
    timings: Timings = Timings()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictBatch:
    """Target -> coordinator.

    Attributes:
        slots_done: [n] u8 verified slots; fewer than sent when the proposal was cut (see `cuts`).
        cuts: [n] u8, values of `Cut`.
        p: flat f32, p_i(x_i) per verified slot (standard rule above temperature 0; empty slots otherwise count 0.0).
        emit: flat u32 per verified slot: recovered candidate r_i (standard) or y_i (coupled, greedy).
        bonus: [n] u32, token of the row behind the last verified slot; meaningful where the status is OK.
        dense_p: flat f32 rows [(slots_done + 1) x vocabulary] for dense streams, else empty.
        features: from the wanted position on; under the standard rule for all verified slots, accepted or not.
        logprobs: of the rounds of streams that asked for them.
        prompt_logprobs: of their prompts, with the round that begins at the prompt's end.
    """

    replies: Replies
    slots_done: U8
    cuts: U8
    p: F32
    emit: U32
    bonus: U32
    dense_p: F32
    timings: Timings = Timings()
    features: Features = NO_FEATURES
    logprobs: Logprobs = NO_LOGPROBS
    prompt_logprobs: Logprobs = NO_LOGPROBS


_HASH_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def prefix_hash(tokens: list[int] | U32, start: int = 0) -> int:
    """Rolling 64-bit hash over tokens; `prefix_hash(b, prefix_hash(a)) == prefix_hash(a + b)`."""
    value = start
    for token in tokens:
        value = ((value ^ int(token)) + 1) * _HASH_MULTIPLIER & _MASK
        value ^= value >> 29
    return value
