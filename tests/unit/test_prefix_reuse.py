"""Prefix reuse: what was computed once is found again, by its own tenant only, and gives the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.block_manager import BlockManager
from outrider.engine.config import EngineConfig
from outrider.engine.model import load_model
from outrider.engine.prefix_index import BlockNames
from outrider.engine.streams import Streams
from outrider.features import FeatureRequest
from outrider.sampling import Rule, SamplingParams
from outrider.seam import StreamOpen, VerifyBatch, prefix_hash
from tests.service.harness import Item, open_stream, propose
from tests.unit.drafting import Bench
from tests.unit.target_driver import Stream, Target, Wish, close, decode, guesses, nothing, plain
from tests.unit.tiny import tiny_llama

OWNER = b"o" * 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@pytest.fixture
def pool() -> BlockManager:
    return BlockManager(num_blocks=16, block_size=4)


@pytest.fixture
def streams(pool: BlockManager) -> Streams:
    held = Streams(pool, lease_s=10.0)
    held.attach(OWNER, epoch=1)
    return held


def fill(streams: Streams, stream_id: int, tokens: list[int], *, salt: int = 0, fork_of: int | None = None) -> Any:
    """A stream that was opened, sent its prompt, and computed up to its last token but one."""
    opened = StreamOpen(
        stream_id=stream_id, prompt_length=len(tokens), params=SamplingParams(), cache_salt=salt, fork_of=fork_of
    )
    sequence = streams.open(opened, OWNER)
    streams.sync(stream_id, OWNER, 0, base=0, tokens=tokens, committed=len(tokens), base_hash=prefix_hash([]))
    found = streams.adopt(sequence, len(tokens) - 1)
    streams.kv.reserve(sequence)
    sequence.cached = len(tokens) - 1
    streams.kv.publish(sequence)
    streams.check_integrity()
    return sequence, found


# ---- the books ----


def test_a_name_stands_for_the_whole_prefix_and_its_tenant() -> None:
    """Guards against hits on a block whose own tokens agree behind another prefix, or on another tenant's block."""
    one = BlockNames(0, 4).upto([1, 2, 3, 4, 9, 9, 9, 9], 2)
    assert one == BlockNames(0, 4).upto([1, 2, 3, 4, 9, 9, 9, 9, 5], 2)
    assert one[1] != BlockNames(0, 4).upto([1, 2, 3, 5, 9, 9, 9, 9], 2)[1]
    assert not set(one) & set(BlockNames(1, 4).upto([1, 2, 3, 4, 9, 9, 9, 9], 2))


def test_names_follow_the_tokens_that_were_cut() -> None:
    """Guards against a name of tokens that are gone."""
    names, tokens = BlockNames(0, 4), list(range(12))
    names.upto(tokens, 3)
    names.cut(7)
    tokens[7:] = [50, 51, 52, 53, 54]
    assert names.upto(tokens, 3) == BlockNames(0, 4).upto(tokens, 3)


@pytest.mark.parametrize(("length", "found"), [(7, 4), (8, 4), (9, 8), (10, 8), (3, 0)])
def test_a_hit_covers_whole_blocks_and_never_the_last_token(streams: Streams, length: int, found: int) -> None:
    """Guards the boundary: a prompt of k blocks and one token less or more, whose last row must be computed."""
    tokens = list(range(100, 112))
    fill(streams, 1, tokens)
    assert fill(streams, 2, tokens[:length])[1] == found


def test_a_closed_streams_blocks_are_free_and_found_until_they_are_needed(streams: Streams, pool: BlockManager) -> None:
    """Guards against a cache that eats the pool, and against one that forgets at once."""
    tokens = list(range(17))
    fill(streams, 1, tokens)
    streams.close(1, OWNER)
    assert pool.free_blocks == 16
    assert fill(streams, 2, tokens)[1] == 16
    streams.close(2, OWNER)
    for stream_id in range(3, 7):  # sixteen blocks, so that every resting one is taken
        fill(streams, stream_id, [stream_id] * 16)
    assert pool.free_blocks == 0
    for stream_id in range(3, 7):
        streams.close(stream_id, OWNER)
    assert fill(streams, 7, tokens)[1] == 0


def test_what_rested_longest_is_forgotten_first_and_of_a_prefix_its_end(streams: Streams, pool: BlockManager) -> None:
    """Guards the order of eviction: a prefix that lost its first block is of no use to anyone."""
    fill(streams, 1, [1] * 17)
    streams.close(1, OWNER)
    fill(streams, 2, [2] * 17)
    streams.close(2, OWNER)
    fill(streams, 3, [3] * 40)  # ten of sixteen blocks: eight have no name, so two are evicted
    assert pool.share([], BlockNames(0, 4).upto([1] * 17, 4)) == 2
    assert pool.share([], BlockNames(0, 4).upto([2] * 17, 4)) == 4


def test_drafted_tokens_are_never_found(streams: Streams) -> None:
    """Guards against an index of tokens that nobody committed."""
    sequence, _ = fill(streams, 1, [1, 2, 3, 4, 5])
    sequence.tokens += [6, 7, 8, 9]
    streams.kv.reserve(sequence)
    sequence.cached = 9
    streams.kv.publish(sequence)
    assert fill(streams, 2, [1, 2, 3, 4, 5, 6, 7, 8, 9])[1] == 4


def test_cutting_into_a_shared_block_leaves_it_to_the_others(streams: Streams, pool: BlockManager) -> None:
    """Guards against one stream's roll-back that rewrites what another reads."""
    first, _ = fill(streams, 1, list(range(9)))
    second, _ = fill(streams, 2, list(range(9)))
    shared = list(first.blocks[:2])
    assert second.blocks[:2] == shared
    tokens = [0, 1, 2, 3, 4, 77, 78, 79, 80]
    streams.sync(2, OWNER, 1, base=0, tokens=tokens, committed=9, base_hash=prefix_hash([]))
    assert (second.blocks, second.cached, second.shared) == ([shared[0]], 4, 4)
    streams.check_integrity()
    assert second.span(1).start == 4
    # Alone with it, a stream keeps the block and takes its name away.
    streams.close(2, OWNER)
    streams.sync(1, OWNER, 1, base=0, tokens=tokens, committed=9, base_hash=prefix_hash([]))
    assert (first.blocks[:2], first.cached, first.shared) == (shared, 5, 4)
    streams.check_integrity()
    assert fill(streams, 3, list(range(9)))[1] == 4


def test_a_span_into_shared_blocks_is_refused(streams: Streams) -> None:
    """Planted error: feeding again without `rewind` would write where others read."""
    sequence, _ = fill(streams, 1, list(range(9)))
    with pytest.raises(ValueError, match="shared up to 8"):
        sequence.span(wanted=3)
    streams.kv.rewind(sequence, 6)
    assert sequence.span(wanted=3).start == 6


def test_integrity_finds_a_writable_block_that_others_read(streams: Streams, pool: BlockManager) -> None:
    """Planted error: a stream that believes a shared block to be its own."""
    fill(streams, 1, list(range(9)))
    sequence, _ = fill(streams, 2, list(range(9)))
    sequence.shared = 4
    with pytest.raises(RuntimeError, match="may be written"):
        streams.check_integrity()


def test_a_fork_copies_the_partial_block(streams: Streams, pool: BlockManager) -> None:
    """Guards against n samples of one prompt that each compute its end."""
    parent, _ = fill(streams, 1, list(range(11)))
    fork, found = fill(streams, 2, list(range(11)), fork_of=1)
    assert found == 10
    assert fork.blocks[:2] == parent.blocks[:2] and fork.blocks[2] != parent.blocks[2]
    assert pool.take_copies() == [(parent.blocks[2], fork.blocks[2], 2)]
    assert fill(streams, 3, [*range(10), 99], fork_of=1)[1] == 10
    assert fill(streams, 4, [*range(9), 98, 99], fork_of=1)[1] == 8


# ---- the same bits ----


@pytest.fixture(scope="module", params=["float64", "bfloat16"])
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.set_num_threads(1)
    folder = tiny_llama(tmp_path_factory.mktemp(request.param), dtype=getattr(torch, request.param))
    config = EngineConfig(
        model=str(folder), dtype=request.param, threads=1, kv_cache_tokens=4096, max_num_batched_tokens=256
    )
    model = load_model(config)
    model.allocate_kv(model.num_blocks)
    return model


def target_of(model: Any, **limits: int) -> Target:
    return Target(model, num_blocks=model.num_blocks, block_size=model.info.block_size, **limits)


SAMPLED = SamplingParams(temperature=1.2, max_tokens=64)


def test_a_warm_prompts_text_is_a_cold_ones(llama: Any) -> None:
    """Guards bits through reuse: prompts of k blocks and one token less or more, sent three times to one target, the
    second time while the first is still decoding, against a target that knows nothing."""
    draw = np.random.default_rng(3)
    base = draw.integers(1, 128, 70).tolist()
    for length in (31, 32, 33, 47, 64, 65):
        cold = Stream(1, base[:length], SAMPLED, rule=Rule.COUPLED, seed=5)
        decode(target_of(llama), [cold], nothing, 24)
        warm = target_of(llama, max_num_batched_tokens=64)
        for first in (1, 11):
            together = [Stream(first + i, base[:length], SAMPLED, rule=Rule.COUPLED, seed=5) for i in range(2)]
            decode(warm, together, guesses({one.stream_id: cold.text for one in together}, 128, seed=first), 24)
            assert all(one.text[:24] == cold.text[:24] for one in together), f"length {length}"
        assert warm.verifier.streams.kv.prefix_tokens.found >= 2 * ((length - 1) // 16 * 16)


def test_two_turns_of_a_chat_share_the_first(llama: Any) -> None:
    """Guards reuse of what was generated: the second turn's prompt holds the first one's answer."""
    first = Stream(1, list(range(1, 41)), SAMPLED, rule=Rule.COUPLED, seed=1)
    warm = target_of(llama)
    decode(warm, [first], guesses({1: first.text}, 128, seed=2), 40)
    prompt = [*first.tokens[:75], 3, 5, 7]
    second, cold = (Stream(2, prompt, SAMPLED, rule=Rule.COUPLED, seed=9) for _ in range(2))
    decode(warm, [second], nothing, 20)
    assert warm.verifier.streams.kv.prefix_tokens.found == 64
    decode(target_of(llama), [cold], nothing, 20)
    assert second.text[:20] == cold.text[:20]


def test_forks_read_the_prompt_once(llama: Any) -> None:
    """Guards n samples of one prompt: its rows are computed once, and each sample's text is what it is alone."""
    prompt = np.random.default_rng(8).integers(1, 128, 90).tolist()

    def samples() -> list[Stream]:
        return [
            Stream(1 + index, prompt, SAMPLED, rule=Rule.COUPLED, seed=4, sample_index=index) for index in range(16)
        ]

    alone = samples()
    for stream in alone:
        decode(target_of(llama), [stream], nothing, 12)
    together, target = samples(), target_of(llama)
    fed: list[int] = []
    forward = llama.forward
    target.model = type("Counting", (), {"info": llama.info, "copy_kv": staticmethod(llama.copy_kv)})()
    target.model.forward = lambda spans: (fed.append(sum(len(span.tokens) for span in spans)), forward(spans))[1]
    batch = plain(together, 12)
    target.send(replace_opens(batch, fork_of=1))
    for verdict in target.settle():
        stream = together[verdict.stream_id - 1]
        stream.accept(verdict, None)
    assert {tuple(one.text) for one in together} == {tuple(one.text[:12]) for one in alone}
    assert sum(fed) == 90 + 15 + 16 * 11  # the prompt once, its last token fifteen times more, then token by token
    target.send(close(*(one.stream_id for one in together)))
    target.settle()
    assert target.verifier.streams._block_manager.used_blocks == 0


def replace_opens(batch: VerifyBatch, fork_of: int) -> VerifyBatch:
    """The message with every stream but the first opened as a fork of the first."""
    opens = (batch.opens[0], *(replace(opened, fork_of=fork_of) for opened in batch.opens[1:]))
    return replace(batch, opens=opens)


def test_another_tenant_finds_nothing(llama: Any) -> None:
    """Guards against a cache through which one tenant learns another's prompts."""
    prompt = list(range(1, 60))
    target = target_of(llama)
    decode(target, [Stream(1, prompt, SAMPLED)], nothing, 4)
    batch = plain([Stream(2, prompt, SAMPLED)], 4)
    target.send(replace(batch, opens=(replace(batch.opens[0], cache_salt=7),)))
    target.settle()
    assert target.verifier.streams.kv.prefix_tokens.found == 0


def test_a_warm_prompt_has_the_features_that_a_head_looks_at(llama: Any) -> None:
    """Guards a head's first proposal on a warm prompt: what it looks back on is computed again, with the same bits."""
    prompt = list(range(1, 100))
    target = target_of(llama)
    wish = Wish(FeatureRequest(layers=(0, 1), window=20), [0])
    blocks = []
    for stream_id in (1, 2):
        target.send(plain([Stream(stream_id, prompt, SAMPLED)], 1, wish=wish))
        (verdict,) = target.settle()
        blocks.append(verdict.features)
    assert target.verifier.streams.kv.prefix_tokens.found == 64  # 98 are to be found, 20 of them kept back
    assert blocks[1].first == 79 and len(blocks[1].rows) == 20
    assert np.array_equal(blocks[0].rows, blocks[1].rows)


def test_a_warm_draft_proposes_what_a_cold_one_does(llama: Any) -> None:
    """Guards acceptance on warm prompts: the draft finds its own KV again and proposes the same."""
    prompt = list(range(1, 70))
    bench = Bench(llama)
    proposals = [
        bench.propose(propose([Item(stream_id, prompt)], 4, opens=(open_stream(stream_id, prompt, GREEDY),)))
        for stream_id in (1, 2)
    ]
    assert proposals[0][1] == proposals[1][2] and len(proposals[0][1]) == 4
    assert bench.streams.kv.prefix_tokens.found == 64


def test_what_is_found_is_counted_when_there_is_room(llama: Any) -> None:
    """Guards `cached_tokens` and hit rates: a stream that waits for room looks again at every step."""
    prompt = list(range(1, 60))
    target = Target(llama, num_blocks=7, block_size=16)
    first, second = Stream(1, prompt, SAMPLED), Stream(2, [*prompt, 9], SAMPLED)
    target.send(plain([first, second], 20))
    target.settle()  # at first the second one has no room; once the first prompt has been read it shares that
    found = target.verifier.streams.kv.prefix_tokens
    assert (found.asked, found.found) == (58 + 59, 48)
    sequence = target.verifier.streams.get(2)
    assert sequence is not None and sequence.prefix_tokens == 48
