"""The draft's KV as a budget of its own: who is refused, who gives way, and what a windowed draft keeps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from outrider.engine.config import EngineConfig
from outrider.engine.model import LoadedModel, load_model
from outrider.engine.stub import parse
from outrider.engine.stub_model import load_stub
from outrider.errors import Status
from outrider.sampling import SamplingParams
from tests.service.harness import Item, drafted, open_stream, propose
from tests.unit.drafting import Bench
from tests.unit.tiny import tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=1_000)


def perfect() -> Any:
    return load_stub(parse("stub:perfect"))


def ask(bench: Bench, stream_id: int, tokens: list[int], slots: int = 3, generation: int = 0) -> tuple[int, Status]:
    """Slots and status of a first item."""
    opens = (open_stream(stream_id, tokens, GREEDY),)
    bench.send(propose([Item(stream_id, tokens, generation=generation)], slots, opens=opens))
    batch = bench.run()
    return len(drafted(batch)[stream_id]), batch.replies.status(0)


def prompt(stream_id: int, length: int) -> list[int]:
    return [stream_id, *range(10, 10 + length - 1)]


def test_a_prompt_that_has_no_room_takes_nothing() -> None:
    """Guards the streams that draft: a prompt read in pieces until the pool is full would leave them none to grow."""
    bench = Bench(perfect(), num_blocks=8, max_num_batched_tokens=32)
    for stream_id in range(1, 4):
        assert ask(bench, stream_id, prompt(stream_id, 20)) == (3, Status.OK)
    held = bench.blocks.used_blocks
    assert ask(bench, 4, prompt(4, 100)) == (0, Status.RESOURCE_EXHAUSTED)
    assert bench.blocks.used_blocks == held
    for stream_id in range(1, 3):  # the others can go on, each into a block of its own
        tokens = [*prompt(stream_id, 20), *range(30, 43)]
        bench.send(propose([Item(stream_id, tokens)], 3))
        assert len(drafted(bench.run())[stream_id]) == 3


def test_streams_give_way_once() -> None:
    """Guards a pool for two of eight streams against streams that throw each other out for ever."""
    bench = Bench(perfect(), num_blocks=8)
    evicted = dict.fromkeys(range(1, 9), 0)
    drafted_by = dict.fromkeys(evicted, 0)
    draw = random.Random(4)
    for generation in range(1, 200):
        stream_id = draw.randrange(1, 9)
        before = {one.opened.stream_id for one in bench.streams if one.blocks}
        slots, status = ask(bench, stream_id, prompt(stream_id, 40), generation=generation)
        assert (slots, status) in ((3, Status.OK), (0, Status.RESOURCE_EXHAUSTED))
        drafted_by[stream_id] += slots
        for gone in before - {one.opened.stream_id for one in bench.streams if one.blocks}:
            evicted[gone] += 1
        bench.now += 2.0
    assert max(evicted.values()) == 1
    assert bench.proposer.room.evictions == sum(evicted.values()) > 3
    assert sum(drafted_by.values()) > 100


def test_a_prompt_beside_drafting_streams_is_read_in_pieces_that_are_soon_done() -> None:
    """Guards the deadlines of those that draft: rows of 2 ms make pieces of 100 ms at most, whatever the budget."""
    bench = Bench(perfect(), num_blocks=256, max_num_batched_tokens=2048)
    bench.send(propose([Item(1, [5])], 40, opens=(open_stream(1, [5], GREEDY),)))
    bench.step(took_s=0.01, row_s=0.002)
    long = [10 + i % 90 for i in range(600)]
    bench.send(propose([Item(2, long)], 0, opens=(open_stream(2, long, GREEDY),)))
    pieces = []
    while 2 in bench.proposer.intake.jobs and 1 in bench.proposer.intake.jobs:
        assert bench.step(took_s=0.01, row_s=0.002)
        pieces += [len(span.tokens) for span in bench.steps[-1].spans if span.stream_id == 2]
    assert pieces[0] == 64, "nothing is known yet"
    assert len(pieces) > 10 and max(pieces[1:]) <= 50


def test_room_that_appears_is_used() -> None:
    """Guards against a stream that goes without for ever: what others leave is there for the next item."""
    bench = Bench(perfect(), num_blocks=4)
    assert ask(bench, 1, prompt(1, 40))[0] == 3
    assert ask(bench, 2, prompt(2, 40)) == (0, Status.RESOURCE_EXHAUSTED)
    bench.send(propose([], [], closed=(1,)))
    assert ask(bench, 2, prompt(2, 40), generation=1) == (3, Status.OK)


# ---- a windowed draft ----


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    folder = tiny_llama(tmp_path_factory.mktemp("llama"), dtype=torch.float64)
    config = EngineConfig(
        model=str(folder), dtype="float64", threads=1, kv_cache_tokens=2048, max_num_batched_tokens=128
    )
    model = load_model(config)
    model.allocate_kv(model.num_blocks)
    return model


def rounds(bench: Bench, tokens: list[int], *, count: int, gamma: int = 4, seed: int = 0) -> list[list[int]]:
    """What is drafted over rounds in which a random part is accepted."""
    draw = random.Random(seed)
    proposals = []
    opens: tuple[Any, ...] = (open_stream(1, tokens, GREEDY),)
    for _ in range(count):
        bench.send(propose([Item(1, list(tokens))], gamma, opens=opens))
        x = drafted(bench.run())[1]
        proposals.append(x)
        tokens = [*tokens, *x[: draw.randint(0, len(x))], draw.randrange(1, 128)]
        opens = ()
    return proposals


def test_a_window_as_long_as_the_text_changes_nothing(llama: LoadedModel) -> None:
    """Guards the places of KV behind the window: while nothing is let go of, a windowed draft is a whole one."""
    tokens = list(range(1, 101))
    whole = rounds(Bench(llama), tokens, count=12)
    assert rounds(Bench(llama, window=512), tokens, count=12) == whole


@pytest.mark.parametrize("window", [1, 7, 32, 100])
def test_a_windowed_draft_keeps_few_blocks_and_drafts_on(llama: LoadedModel, window: int) -> None:
    """Guards memory that is bounded by the window, through roll-backs into it and behind it."""
    bench = Bench(llama, window=window, max_num_batched_tokens=64)
    proposals = rounds(bench, list(range(1, 121)) * 4, count=25)
    assert all(len(x) == 4 for x in proposals)
    (sequence,) = bench.streams
    assert len(sequence.tokens) > 500
    if window > 4:  # below, a rejection reaches behind the window and everything is read anew
        assert len(sequence.blocks) * 16 <= window + 16 + 3 * 16
    bench.send(propose([], [], closed=(1,)))
    assert bench.blocks.used_blocks == 0


def test_a_windowed_drafts_rows_are_those_of_a_masked_pass(llama: LoadedModel) -> None:
    """Guards which keys a row sees and the rotation that it keeps: against the plain network with the middle masked.

    After the prompt was read whole, the slots of one round see the first 16 positions and the window only.
    """
    tokens = [int(token) for token in torch.randint(1, 128, (100,), generator=torch.Generator().manual_seed(2))]
    bench = Bench(llama, window=32, max_num_batched_tokens=128)
    bench.send(propose([Item(1, tokens)], 0, opens=(open_stream(1, tokens, GREEDY),)))
    bench.run()
    (sequence,) = bench.streams
    assert sequence.dropped == 48  # 100 - 16 - 32, in whole blocks
    committed = [*tokens, 5]
    bench.send(propose([Item(1, committed)], 1))
    (x,) = drafted(bench.run())[1]

    network = llama._network.network
    with torch.inference_mode():
        llama._network.use_plain()
        try:
            cache = DynamicCache()
            network(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True)
            for layer in cache.layers:
                layer.keys = torch.cat((layer.keys[:, :, :16], layer.keys[:, :, 64:]), 2)
                layer.values = torch.cat((layer.values[:, :, :16], layer.values[:, :, 64:]), 2)
            position = torch.tensor([[100]])
            out = network(input_ids=torch.tensor([[5]]), position_ids=position, cache=cache, use_cache=True).logits[
                0, -1
            ]
        finally:
            llama._network.use_paged()
    assert x == int(out.argmax())
    margin = out.topk(2).values
    assert float(margin[0] - margin[1]) > 1e-6, "the choice must be clear to prove a thing"


def test_a_fork_of_a_windowed_stream_has_no_gap(llama: LoadedModel) -> None:
    """Guards n samples beside a window: the parent's table is shorter than its prompt, and no block stands where its
    tokens would have it."""
    tokens = [3 + (7 * place) % 90 for place in range(100)]
    bench = Bench(llama, window=32, max_num_batched_tokens=128)
    opens = (open_stream(1, tokens, GREEDY), open_stream(2, tokens, GREEDY, fork_of=1))
    bench.send(propose([Item(1, tokens), Item(2, tokens)], 0, opens=opens))
    bench.run()
    bench.send(propose([Item(1, tokens, generation=1), Item(2, tokens, generation=1)], 4))
    proposals = drafted(bench.run())
    assert proposals[1] == proposals[2] and len(proposals[1]) == 4
    bench.streams.check_integrity()
