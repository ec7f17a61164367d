"""The codec: what is sent is what is read, and unreadable messages name their column."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidArgument
from outrider.features import NOT_WANTED, FeatureBlock, FeatureRequest, Features
from outrider.grammar import Grammar, GrammarKind
from outrider.logprobs import LogprobBlock, LogprobRows, Logprobs
from outrider.planted import Plant
from outrider.rpc import codec
from outrider.rpc.codec import Limits
from outrider.rpc.stream_codec import open_from_pb, open_to_pb, params_from_pb, params_to_pb
from outrider.sampling import Form, Rule, SamplingParams
from outrider.seam import (
    Items,
    Note,
    ProposalBatch,
    ProposeBatch,
    Replies,
    Slots,
    StreamOpen,
    Timings,
    VerdictBatch,
    VerifyBatch,
)
from outrider.v1 import common_pb2, draft_pb2

LIMITS = Limits(max_items=64, max_slots=16)


def some_items(rng: np.random.Generator, n: int) -> Items:
    counts = rng.integers(0, 4, n).astype(np.uint32)
    bases = rng.integers(1, 100, n).astype(np.uint32)
    return Items(
        stream_ids=rng.integers(0, 2**64, n, dtype=np.uint64),
        generations=rng.integers(0, 2**32, n, dtype=np.uint32),
        committed_lengths=bases + counts,
        bases=bases,
        prefix_hashes=rng.integers(0, 2**64, n, dtype=np.uint64),
        token_counts=counts,
        tokens=rng.integers(0, 2**32, int(counts.sum()), dtype=np.uint32),
    )


def some_slots(rng: np.random.Generator, n: int) -> Slots:
    per_item = rng.integers(0, 6, n).astype(np.uint8)
    slots = int(per_item.sum())
    sizes = rng.integers(0, 9, slots).astype(np.uint16)
    support = int(sizes.sum())
    return Slots(
        per_item=per_item,
        draft_ids=rng.integers(0, 2**32, slots, dtype=np.uint32),
        own_counts=rng.integers(0, 2**16, slots, dtype=np.uint16),
        support_sizes=sizes,
        q_ids=rng.integers(0, 2**32, support, dtype=np.uint32),
        q_counts=rng.integers(0, 2**16, support, dtype=np.uint16),
        dense_q=rng.random(2 * slots, dtype=np.float32),
    )


def some_replies(rng: np.random.Generator, n: int) -> Replies:
    return Replies(
        stream_ids=rng.integers(0, 2**64, n, dtype=np.uint64),
        generations=rng.integers(0, 2**32, n, dtype=np.uint32),
        committed_lengths=rng.integers(0, 2**32, n, dtype=np.uint32),
        statuses=rng.choice(np.array([0, 5, 9, 10], np.uint8), n),
        cached_lengths=rng.integers(0, 2**32, n, dtype=np.uint32),
        errors={0: "gone"} if n else {},
        notes={0: Note(48, 1)} if n else {},
    )


def some_features(rng: np.random.Generator, n: int) -> Features:
    return Features.of(
        [
            (int(rng.integers(0, 2**63)), FeatureBlock(index, rng.integers(0, 256, (index % 3, 12), np.uint8)))
            for index in range(n)
        ]
    )


def some_logprobs(rng: np.random.Generator, n: int) -> Logprobs:
    def rows(slots: int, k: int) -> LogprobRows:
        return LogprobRows(
            rng.random(2 * slots + 1, dtype=np.float32),
            rng.integers(0, 2**32, (slots + 1, k), dtype=np.uint32),
            rng.random((slots + 1, k), dtype=np.float32),
        )

    return Logprobs.of([LogprobBlock(2**63 + index, index, rows(index % 3, index % 4)) for index in range(n)])


OPEN = StreamOpen(
    stream_id=2**64 - 1,
    prompt_length=7,
    params=SamplingParams(
        temperature=0.5,
        top_k=40,
        logit_bias=((3, -100.0),),
        stop_token_ids=(2, 9),
        max_tokens=5,
        bad_words=((7,), (3, 2**32 - 1)),
        grammar=Grammar(GrammarKind.REGEX, "[ab]+"),
    ),
    rule=Rule.COUPLED,
    form=Form.DENSE,
    draft_key=1,
    emit_key=2**64 - 2,
    gumbel_key=3,
    sample_index=65_535,
    fork_of=0,
    logprobs=0,
    prompt_logprobs=20,
    deadline_ms=5_000,
    planted=Plant.ROW_SHIFT,
)


def some_batch(kind: type, rng: np.random.Generator, n: int) -> Any:
    timings = Timings(queue_ms=0.5, forward_ms=2.0, sample_ms=0.25, total_ms=3.0, step_streams=n, step_tokens=3 * n)
    closed = rng.integers(0, 2**64, 2, dtype=np.uint64)
    if kind is ProposeBatch:
        return ProposeBatch(
            items=some_items(rng, n),
            slots=rng.integers(0, 17, n).astype(np.uint8),
            deadlines_ms=rng.integers(0, 2**16, n, dtype=np.uint16),
            least_survivals=rng.integers(0, 2**16, n, dtype=np.uint16),
            opens=(OPEN,),
            closed=closed,
            features=some_features(rng, n // 2),
        )
    if kind is VerifyBatch:
        runs = rng.integers(0, 2**16, n, dtype=np.uint16)
        wanted_from = rng.choice(np.array([0, 5, NOT_WANTED], np.uint32), n)
        return VerifyBatch(
            items=some_items(rng, n),
            slots=some_slots(rng, n),
            runs=runs,
            opens=(OPEN,),
            closed=closed,
            features_from=wanted_from,
            feature_request=FeatureRequest((2, 4, 9), 64),
        )
    if kind is ProposalBatch:
        return ProposalBatch(replies=some_replies(rng, n), slots=some_slots(rng, n), timings=timings)
    done = rng.integers(0, 6, n).astype(np.uint8)
    slots = int(done.sum())
    return VerdictBatch(
        replies=some_replies(rng, n),
        slots_done=done,
        cuts=rng.integers(0, 3, n).astype(np.uint8),
        p=rng.random(slots, dtype=np.float32),
        emit=rng.integers(0, 2**32, slots, dtype=np.uint32),
        bonus=rng.integers(0, 2**32, n, dtype=np.uint32),
        dense_p=rng.random(3 * n, dtype=np.float32),
        timings=timings,
        features=some_features(rng, n // 2),
        logprobs=some_logprobs(rng, n // 2),
        prompt_logprobs=some_logprobs(rng, n // 3),
    )


def over_the_wire(batch: Any) -> Any:
    if isinstance(batch, ProposeBatch):
        data = codec.propose_to_pb(batch).SerializeToString()
        return codec.propose_from_pb(draft_pb2.ProposeRequest.FromString(data), LIMITS).batch
    if isinstance(batch, VerifyBatch):
        return codec.verify_from_pb(codec.verify_to_pb(batch), LIMITS).batch
    if isinstance(batch, ProposalBatch):
        return codec.proposal_from_pb(codec.proposal_to_pb(batch))
    return codec.verdict_from_pb(codec.verdict_to_pb(batch))


def assert_same(left: Any, right: Any) -> None:
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if is_dataclass(a) and not isinstance(a, StreamOpen):
            assert_same(a, b)
        elif isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=field.name)
            assert a.dtype == b.dtype
        else:
            assert a == b, field.name


@pytest.mark.parametrize("kind", [ProposeBatch, VerifyBatch, ProposalBatch, VerdictBatch])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 20))
def test_every_batch_survives_the_wire(kind: type, seed: int, n: int) -> None:
    """Guards against a column that is swapped, narrowed or forgotten on one side."""
    batch = some_batch(kind, np.random.default_rng(seed), n)
    assert_same(batch, over_the_wire(batch))


def test_columns_are_read_without_copies() -> None:
    """Guards the cost of the wire: a column must borrow the message's memory."""
    batch = codec.proposal_from_pb(codec.proposal_to_pb(some_batch(ProposalBatch, np.random.default_rng(1), 8)))
    assert not batch.slots.q_ids.flags.owndata
    assert not batch.slots.q_ids.flags.writeable


@pytest.mark.parametrize(
    ("column", "field"),
    [
        ("items", "generations"),
        ("items", "committed_lengths"),
        ("items", "bases"),
        ("items", "prefix_hashes"),
        ("items", "token_counts"),
        ("items", "tokens"),
        ("slots", "per_item"),
        ("slots", "draft_ids"),
        ("slots", "own_counts"),
        ("slots", "support_sizes"),
        ("slots", "q_ids"),
        ("slots", "q_counts"),
        (None, "runs"),
        (None, "features_from"),
    ],
)
@pytest.mark.parametrize("damage", ["short", "long", "torn"])
def test_a_column_that_contradicts_the_others_is_named(column: str | None, field: str, damage: str) -> None:
    """Guards against out-of-range reads behind a truncated or padded column (a crash, or another stream's tokens)."""
    message = codec.verify_to_pb(some_batch(VerifyBatch, np.random.default_rng(2), 8))
    part = getattr(message, column) if column else message
    data = getattr(part, field)
    if damage == "short":
        data = data[:-8]
    elif damage == "long":
        data += bytes(8)
    else:
        data = data[:-1]
    setattr(part, field, data)
    # Damaged counts show up in the column that they count.
    named = {"token_counts": "tokens|", "per_item": "draft_ids|support_sizes|", "support_sizes": "q_ids|"}
    with pytest.raises(InvalidArgument, match=named.get(field, "") + field):
        codec.verify_from_pb(message, LIMITS)


@pytest.mark.parametrize("field", ["first_positions", "row_counts", "row_bytes", "rows"])
@pytest.mark.parametrize("cut", [4, 1])
def test_a_damaged_column_of_features_is_named(field: str, cut: int) -> None:
    """Guards against rows of one stream that are read as another's."""
    message = codec.verdict_to_pb(some_batch(VerdictBatch, np.random.default_rng(5), 8))
    setattr(message.features, field, getattr(message.features, field)[:-cut])
    with pytest.raises(InvalidArgument, match=f"features.{field}"):
        codec.verdict_from_pb(message)


@pytest.mark.parametrize("field", ["committed_lengths", "own_counts", "row_counts", "widths", "own", "top_ids", "top"])
def test_a_damaged_column_of_logprobs_is_named(field: str) -> None:
    """Guards against log-probabilities of one stream that are read as another's."""
    message = codec.verdict_to_pb(some_batch(VerdictBatch, np.random.default_rng(5), 16))
    setattr(message.logprobs, field, getattr(message.logprobs, field)[:-4])
    with pytest.raises(InvalidArgument, match=f"logprobs.{field}"):
        codec.verdict_from_pb(message)


def test_more_alternatives_than_the_cap_are_refused() -> None:
    """Guards the target's memory and the link against a client that goes past the door."""
    with pytest.raises(InvalidArgument, match=r"^logprobs: must be at most 20"):
        open_from_pb(open_to_pb(replace(OPEN, logprobs=21)))


def test_an_absurd_feature_request_is_refused() -> None:
    """Guards the target's memory: the window decides how many rows it keeps of each stream."""
    message = codec.verify_to_pb(some_batch(VerifyBatch, np.random.default_rng(6), 4))
    message.feature_request.window = 1 << 20
    with pytest.raises(InvalidArgument, match=r"feature_request\.window"):
        codec.verify_from_pb(message, LIMITS)


def test_a_message_with_too_many_items_is_refused() -> None:
    """Guards the bound on one message's memory and work."""
    message = codec.propose_to_pb(some_batch(ProposeBatch, np.random.default_rng(3), 9))
    with pytest.raises(InvalidArgument, match="stream_ids: has 9 items, more than the 8"):
        codec.propose_from_pb(message, Limits(max_items=8, max_slots=16))


def test_one_bad_item_does_not_spoil_its_message() -> None:
    """Guards the other streams of a message against one stream's bad length, slots or opening."""
    batch = some_batch(ProposeBatch, np.random.default_rng(4), 4)
    lengths = batch.items.committed_lengths.copy()
    lengths[1] += 1
    slots = np.array([1, 1, 17, 1], np.uint8)
    bad_open = replace(OPEN, stream_id=int(batch.items.stream_ids[3]))
    message = codec.propose_to_pb(
        replace(batch, items=replace(batch.items, committed_lengths=lengths), slots=slots, opens=(OPEN, bad_open))
    )
    message.opens[1].params.temperature = float("nan")
    request = codec.propose_from_pb(message, LIMITS)
    assert request.batch.opens == (OPEN,)
    assert {index: error.field for index, error in request.refused.items()} == {
        1: "committed_lengths",
        2: "slots",
        3: "temperature",
    }


def test_unknown_fields_are_skipped() -> None:
    """Guards rolling upgrades: a newer peer's extra columns must not matter."""
    batch = some_batch(ProposeBatch, np.random.default_rng(5), 3)
    unknown_field = bytes([0x9A, 0x06, 3]) + b"abc"  # field 99, three bytes
    data = codec.propose_to_pb(batch).SerializeToString() + unknown_field
    assert_same(batch, codec.propose_from_pb(draft_pb2.ProposeRequest.FromString(data), LIMITS).batch)


def test_unset_parameters_take_the_stated_defaults_and_zero_stays_zero() -> None:
    """Guards against "unset" and 0 becoming the same thing (temperature 0 read as 1, or unset read as greedy)."""
    assert params_from_pb(common_pb2.SamplingParams()) == SamplingParams()
    assert params_from_pb(params_to_pb(SamplingParams(temperature=0.0))).greedy
    assert open_from_pb(open_to_pb(OPEN)) == OPEN
    assert open_from_pb(open_to_pb(replace(OPEN, fork_of=None, logprobs=None))).fork_of is None


def test_the_smallest_legal_top_p_stays_legal() -> None:
    """Guards against a request that passes at the door and is refused behind it because float32 rounds it to 0."""
    assert params_from_pb(params_to_pb(SamplingParams(top_p=1e-300))).top_p > 0


@pytest.mark.parametrize("temperature", [0.0, 9.9999997e-5, 1e-4, 1.0000001e-4, 1.0])
def test_both_ends_agree_on_what_is_greedy(temperature: float) -> None:
    """The coordinator would wait for rows of p that the target does not send; 0.0001 in single precision is below."""
    params = SamplingParams(temperature=temperature)
    assert params_from_pb(params_to_pb(params)).greedy == params.greedy


def test_an_unknown_rule_is_refused_by_name() -> None:
    """Guards against guessing what a newer peer means."""
    message = open_to_pb(OPEN)
    message.rule = 9  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match="rule: unknown value 9"):
        open_from_pb(message)


def test_an_unknown_status_is_refused() -> None:
    """Guards the coordinator against a status that it has no transition for."""
    message = codec.proposal_to_pb(some_batch(ProposalBatch, np.random.default_rng(6), 2))
    message.replies.statuses = bytes([0, 77])
    with pytest.raises(InvalidArgument, match="statuses"):
        codec.proposal_from_pb(message)
