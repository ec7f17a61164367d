"""Streams and sequences: caches of the coordinator's committed tokens, and what ends them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outrider.engine.block_manager import BlockManager
from outrider.engine.sequence import Sequence
from outrider.engine.streams import Streams
from outrider.errors import InvalidArgument, Overloaded, StaleCache, UnknownStream
from outrider.planted import Plant
from outrider.sampling import SamplingParams
from outrider.seam import StreamOpen, prefix_hash

OWNER, STRANGER = b"o" * 16, b"s" * 16


def opened(stream_id: int = 1, prompt_length: int = 3, **fields: Any) -> StreamOpen:
    return StreamOpen(stream_id=stream_id, prompt_length=prompt_length, params=SamplingParams(), **fields)


def sequence(tokens: list[int], cached: int = 0) -> Sequence:
    """A sequence that was sent these tokens."""
    made = Sequence(opened=opened(), owner=OWNER, deadline=1e9)
    send(made, tokens)
    made.cached = cached
    return made


def send(target: Sequence, committed: list[int], base: int = 0) -> None:
    target.sync(base, committed[base:], len(committed), prefix_hash(committed[:base]))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool() -> BlockManager:
    return BlockManager(num_blocks=16, block_size=4)


@pytest.fixture
def streams(pool: BlockManager, clock: Clock) -> Streams:
    held = Streams(pool, lease_s=10.0, clock=clock, max_streams=4)
    held.attach(OWNER, epoch=1)
    return held


def sync(streams: Streams, committed: list[int], *, base: int = 0, generation: int = 0, owner: bytes = OWNER):
    return streams.sync(
        1,
        owner,
        generation,
        base=base,
        tokens=committed[base:],
        committed=len(committed),
        base_hash=prefix_hash(committed[:base]),
    )


def test_what_was_guessed_right_keeps_its_kv():
    """Guards against recomputing accepted tokens, and against keeping KV of a rejected one."""
    target = sequence([1, 2, 3], cached=3)
    target.tokens += [4, 5, 6]  # drafted
    target.cached = 6
    send(target, [1, 2, 3, 4, 9], base=3)  # 4 accepted, 5 rejected, 9 recovered
    assert (target.tokens, target.committed, target.cached) == ([1, 2, 3, 4, 9], 5, 4)
    assert target.span(wanted=1)[1:4] == ([9], 4, 1)


def test_a_draft_that_was_accepted_whole_feeds_its_last_token_and_the_bonus():
    """Guards against the silent off-by-one: x_gamma was sampled but never fed."""
    draft = sequence([1, 2, 3], cached=3)
    draft.tokens += [4, 5]
    draft.cached = 4
    send(draft, [1, 2, 3, 4, 5, 6], base=3)
    assert draft.cached == draft.committed - 2
    assert draft.span(wanted=1)[1:4] == ([5, 6], 4, 1)


def test_a_repeated_item_feeds_again_the_tokens_whose_logits_are_wanted():
    """Guards against "no token to feed" when a retry finds everything cached."""
    target = sequence([1, 2, 3], cached=3)
    send(target, [1, 2, 3], base=3)
    assert target.pending == 0
    assert target.span(wanted=1)[1:4] == ([3], 2, 1)


def test_a_cut_span_wants_no_logits_and_never_reaches_the_wanted_rows():
    """Guards against logits of the wrong rows in a prompt fed in pieces."""
    target = sequence([1, 2, 3, 4, 5])
    piece = target.span(wanted=2, limit=3)
    assert (piece.tokens, piece.start, piece.wanted) == ([1, 2, 3], 0, 0)
    target.fed(piece)
    assert target.span(wanted=2, limit=3)[1:4] == ([4, 5], 3, 2)
    with pytest.raises(ValueError, match="cuts into"):
        target.span(wanted=2, limit=1)
    with pytest.raises(ValueError, match="6 rows wanted"):
        target.span(wanted=6)


@pytest.mark.parametrize("length", [-1, 4])
def test_rollback_out_of_range_raises(length: int):
    """Guards against a negative length read as "from the end"."""
    target = sequence([1, 2, 3], cached=3)
    with pytest.raises(ValueError, match="cannot cut"):
        target.rollback(length)
    assert target.cached == 3


def test_rollback_to_zero_forgets_everything():
    """Guards against crop(0) read as "no crop"."""
    target = sequence([1, 2, 3], cached=3)
    target.rollback(0)
    assert (target.tokens, target.cached, target.committed, target.hash_at(0)) == ([], 0, 0, 0)


def test_a_base_beyond_the_known_tokens_asks_for_the_confirmed_ones():
    """Guards against a gap in the middle of a stream."""
    target = sequence([1, 2, 3], cached=3)
    with pytest.raises(StaleCache) as caught:
        send(target, [1, 2, 3, 4, 5, 6], base=5)
    assert caught.value.cached_length == 3
    send(target, [1, 2, 3, 4, 5, 6], base=3)
    assert (target.tokens, target.cached) == ([1, 2, 3, 4, 5, 6], 3)


def test_another_prefix_is_found_out_by_its_hash_and_leads_to_a_full_resend():
    """Guards against answering for a text that the coordinator does not have."""
    target = sequence([1, 2, 3], cached=3)
    truth = [1, 7, 3, 4]
    with pytest.raises(StaleCache) as caught:
        send(target, truth, base=3)
    assert caught.value.cached_length == 0
    assert target.tokens == [1, 2, 3]
    send(target, truth, base=0)
    assert (target.tokens, target.cached) == (truth, 1)


def test_wrong_guesses_ahead_do_not_cost_the_confirmed_prefix():
    """Guards against a full prefill where the base points behind a wrong guess."""
    target = sequence([1, 2, 3], cached=3)
    target.tokens += [4, 5]
    with pytest.raises(StaleCache) as caught:
        send(target, [1, 2, 3, 8, 5, 6], base=5)
    assert caught.value.cached_length == 3


@pytest.mark.parametrize(("base", "tokens", "committed"), [(0, [1, 2], 3), (2, [3, 4], 3), (0, [1, 2], 2)])
def test_columns_that_contradict_each_other_are_refused(base: int, tokens: list[int], committed: int):
    """Guards against a committed length that the tokens do not make up, or that is shorter than the prompt."""
    with pytest.raises(InvalidArgument):
        sequence([1, 2, 3]).sync(base, tokens, committed, prefix_hash([1, 2, 3][:base]))


def test_hashes_at_any_base_follow_rollback():
    """Guards against a hash of tokens that were cut."""
    target = sequence([1, 2, 3, 4])
    assert target.hash_at(4) == prefix_hash([1, 2, 3, 4])
    target.rollback(2)
    target.tokens += [9]
    assert [target.hash_at(n) for n in range(4)] == [prefix_hash([1, 2, 9][:n]) for n in range(4)]


def test_cached_positions_always_hold_the_kv_of_the_known_tokens():
    """Guards every path of sync at once, over random rounds, losses, repeats and restarts of both kinds of service.

    The KV is modelled as the token that was fed at each position.
    """
    coins = random.Random(5)
    for is_draft in (False, True):
        service, kv = sequence([1, 2, 3]), {}
        truth = [1, 2, 3]
        for _ in range(400):
            drafted = [coins.randrange(4) for _ in range(coins.randrange(5))]
            if coins.random() < 0.03:
                service.rollback(0)
            for base in (min(len(truth), coins.randrange(len(truth) + 1)), service.committed, 0):
                try:
                    send(service, truth, base=min(base, len(truth)))
                    break
                except StaleCache:
                    continue
            feeds = [[x] for x in drafted] if is_draft else [drafted]
            for ahead in [[], *feeds] if is_draft else feeds:
                service.tokens += ahead
                span = service.span(wanted=1 if is_draft else len(drafted) + 1)
                kv.update(enumerate(span.tokens, span.start))
                service.fed(span)
            assert service.tokens == truth + drafted
            assert [kv[i] for i in range(service.cached)] == service.tokens[: service.cached]
            if coins.random() < 0.8:  # else the round is repeated
                truth = truth + drafted[: coins.randrange(len(drafted) + 1)] + [coins.randrange(4)]
            if len(truth) > 60:
                service, kv, truth = sequence([1, 2, 3]), {}, [1, 2, 3]


def test_rejected_tokens_give_their_blocks_back(streams: Streams, pool: BlockManager):
    """Guards against a pool that fills up with the tails of long proposals."""
    streams.open(opened(), OWNER)
    held = sync(streams, [1, 2, 3])
    held.tokens += [0] * 9
    streams.kv.reserve(held)
    assert pool.used_blocks == 3
    held.cached = 12
    sync(streams, [1, 2, 3, 0, 7], base=3)
    assert (pool.used_blocks, held.cached) == (2, 4)
    streams.check_integrity()


def test_an_older_generation_is_dropped_and_the_same_one_is_taken_again(streams: Streams):
    """Guards against a late item that undoes a newer one, and against a retry that is not answered."""
    streams.open(opened(), OWNER)
    assert sync(streams, [1, 2, 3, 4], generation=2) is not None
    assert sync(streams, [1, 2, 3], generation=1) is None
    assert sync(streams, [1, 2, 3, 4], generation=2) is not None
    assert streams.get(1).tokens == [1, 2, 3, 4]


def test_unknown_streams_and_those_of_others_are_answered_alike(streams: Streams):
    """Guards against one coordinator reading or ending another's stream."""
    with pytest.raises(UnknownStream):
        sync(streams, [1, 2, 3])
    streams.open(opened(), OWNER)
    with pytest.raises(UnknownStream):
        sync(streams, [1, 2, 3], owner=STRANGER)
    with pytest.raises(InvalidArgument, match="another coordinator"):
        streams.open(opened(), STRANGER)
    assert not streams.close(1, STRANGER)
    assert streams.close(1, OWNER)
    assert not streams.close(1, OWNER)


def test_closing_frees_the_blocks(streams: Streams, pool: BlockManager):
    """Guards against sessions that leak on the ordinary way out."""
    streams.open(opened(), OWNER)
    streams.kv.reserve(sync(streams, [1, 2, 3]))
    streams.close(1, OWNER)
    assert pool.used_blocks == 0 and len(streams) == 0


def test_too_many_streams_are_refused_at_once(streams: Streams):
    """Guards against unbounded growth by a coordinator that never closes."""
    for stream_id in range(4):
        streams.open(opened(stream_id), OWNER)
    with pytest.raises(Overloaded):
        streams.open(opened(9), OWNER)


def test_a_reopened_stream_keeps_its_kv(streams: Streams):
    """Guards against a full prefill after each lost link."""
    streams.open(opened(), OWNER)
    held = sync(streams, [1, 2, 3, 4], generation=5)
    streams.kv.reserve(held)
    held.cached = 4
    assert streams.open(opened(), OWNER) is held
    assert sync(streams, [1, 2, 3, 4, 5], generation=0).cached == 4


def test_a_fork_knows_its_parents_prompt(streams: Streams):
    """Guards against sending a long prompt once per sample; a parent that is gone only costs a resend."""
    streams.open(opened(7), OWNER)
    streams.get(7).tokens = [1, 2, 3, 8, 8]
    fork = streams.open(opened(1, fork_of=7), OWNER)
    assert (fork.tokens, fork.cached) == ([1, 2, 3], 0)
    sync(streams, [1, 2, 3], base=3)
    orphan = streams.open(opened(2, fork_of=99), OWNER)
    with pytest.raises(StaleCache):
        send(orphan, [1, 2, 3], base=3)


def test_a_lost_link_keeps_its_streams_for_one_lease(streams: Streams, clock: Clock, pool: BlockManager):
    """Guards against KV that outlives its coordinator, and against KV that dies with a short outage."""
    streams.open(opened(), OWNER)
    streams.kv.reserve(sync(streams, [1, 2, 3]))
    streams.detach(OWNER, epoch=1)
    clock.now = 9.9
    assert streams.expire() == []
    clock.now = 10.0
    assert streams.expire() == [1]
    assert pool.used_blocks == 0
    assert not streams.is_current(OWNER, 1)


def test_a_link_that_comes_back_in_time_keeps_its_streams(streams: Streams, clock: Clock):
    """Guards against an old lease, or an old link's late end, that ends the streams of the new link."""
    streams.open(opened(), OWNER)
    streams.detach(OWNER, epoch=1)
    streams.attach(OWNER, epoch=2)
    streams.detach(OWNER, epoch=1)
    clock.now = 100.0
    assert streams.expire() == []
    assert 1 in streams and streams.is_current(OWNER, 2) and not streams.is_current(OWNER, 1)
    with pytest.raises(InvalidArgument, match="link_epoch"):
        streams.attach(OWNER, epoch=2)


def test_planted_errors_are_refused_where_they_are_not_allowed(streams: Streams, pool: BlockManager):
    """Guards a service in production against a coordinator that asks it for errors."""
    wanted = opened(planted=Plant.ROW_SHIFT)
    with pytest.raises(InvalidArgument, match="planted_error"):
        streams.open(wanted, OWNER)
    assert len(streams) == 0
    allowing = Streams(pool, lease_s=10.0, allow_planted_errors=True)
    allowing.attach(OWNER, epoch=1)
    assert allowing.open(wanted, OWNER).opened.planted is Plant.ROW_SHIFT


def test_a_stream_ends_at_its_deadline(streams: Streams, clock: Clock):
    """Guards against streams of coordinators that forgot them."""
    streams.open(opened(1, deadline_ms=2000), OWNER)
    streams.open(opened(2, deadline_ms=9000), OWNER)
    assert streams.next_end == 2.0
    clock.now = 2.0
    assert streams.expire() == [1]
    assert streams.next_end == 9.0


def test_dropping_the_cache_keeps_the_stream(streams: Streams, pool: BlockManager):
    """Guards against preemption that loses tokens or keeps blocks."""
    streams.open(opened(), OWNER)
    held = sync(streams, [1, 2, 3])
    streams.kv.reserve(held)
    held.cached = 3
    streams.kv.drop_cache(held)
    assert (pool.used_blocks, held.cached, held.pending) == (0, 0, 3)
    streams.check_integrity()


def test_integrity_finds_kv_without_blocks(streams: Streams):
    """Planted error: positions claimed as cached that no block holds."""
    streams.open(opened(), OWNER)
    sync(streams, [1, 2, 3]).cached = 3
    with pytest.raises(RuntimeError, match="3 cached"):
        streams.check_integrity()
