"""Captured steps, on the CPU: a recorder that runs the captured function again on the same fixed memory stands for the
GPU's, and a plain loop over sequences for its attention kernel. `tests/gpu` has the real ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from outrider.engine import capture, causal_lm, graphs, varlen
from outrider.engine.batch import RowRule
from outrider.engine.causal_lm import PagedCausalLM
from outrider.engine.config import EngineConfig
from outrider.engine.graphs import Graphs
from outrider.engine.hidden_states import HiddenStates
from outrider.engine.memory_plan import Workspace
from outrider.engine.model import LoadedModel, load_model
from outrider.engine.recorder import Recorder, Replay
from outrider.engine.span import Span
from outrider.engine.static_inputs import StaticInputs
from outrider.errors import InvalidArgument
from outrider.sampling import Rule, SamplingParams
from tests.service.harness import Item, open_stream, propose
from tests.unit.drafting import Bench
from tests.unit.target_driver import Stream, Target, decode, guesses, nothing
from tests.unit.tiny import tiny_llama

VOCAB = 128
BLOCKS = 8
RULE = RowRule(16, 16)
LONGEST = 1024
States = tuple[int, ...]


class Again:
    """Runs the function as the GPU would repeat what it launched: from fixed memory to fixed memory."""

    def record(self, run: Replay) -> Replay:
        run()
        return run


def varlen_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    """`varlen_attn` over pages, one sequence after the other; every key of a sequence's pages is masked or used."""
    assert num_splits == 1
    out = torch.zeros_like(query)
    assert cu_queries[-1] == len(query)
    assert torch.equal(cu_keys.diff(), seqused_k)
    for index, used in enumerate(seqused_k.tolist()):
        first, last = int(cu_queries[index]), int(cu_queries[index + 1])
        if first == last:
            continue
        assert last - first <= max_queries
        assert used <= max_keys
        pages = block_table[index, : -(-used // keys.shape[1])].long()
        k, v = keys[pages].flatten(0, 1)[:used], values[pages].flatten(0, 1)[:used]
        position = torch.arange(used - (last - first), used)[:, None]
        seen = torch.arange(used)[None] <= position
        if window_size[0] >= 0:
            seen &= torch.arange(used)[None] >= position - window_size[0]
        parts = (query[first:last], k, v)
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        out[first:last] = attended[0].transpose(0, 1)
    return out


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], PagedCausalLM]:
    """Equal networks on the varlen path, each with KV of its own."""
    monkeypatch.setattr(varlen, "varlen_attn", varlen_reference)
    monkeypatch.setattr(causal_lm, "varlen_obstacle", lambda shape: None)
    folder = tiny_llama(tmp_path, vocab=VOCAB)

    def network() -> PagedCausalLM:
        paged = PagedCausalLM(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        assert paged.backend == "varlen"
        paged.rule = RULE
        paged.allocate_kv(BLOCKS)
        return paged

    return network


def captured(network: PagedCausalLM, recorder: Recorder | None = None, want: States = ()) -> Graphs:
    states = HiddenStates(network.network)
    states.want(want)
    made = Graphs(network, states, recorder or Again(), most_rows=64, most_streams=24, longest=LONGEST)
    made.capture()
    network.graphs = made
    return made


def steps(seed: int, count: int = 60) -> list[list[Span]]:
    """Streams of different length through prompts, plain steps and steps of several rows, alone and together."""
    rng = random.Random(seed)
    texts = {stream: [rng.randrange(VOCAB) for _ in range(500)] for stream in range(BLOCKS // 2)}
    done = dict.fromkeys(texts, 0)
    made = []
    for _ in range(count):
        spans = []
        for stream in rng.sample(sorted(texts), rng.randint(1, len(texts))):
            rows = rng.choice((70, 3)) if not done[stream] else rng.choice((1, 1, 1, 2, 5, 9))
            start = done[stream]
            if start + rows > 500:
                continue
            tokens = texts[stream][start : start + rows]
            wanted = rng.choice((0, 1, rows))
            spans.append(Span(stream, tokens, start, wanted, [2 * stream, 2 * stream + 1], 0, 0))
            done[stream] += rows
        if spans:
            made.append(spans)
    return made


@torch.inference_mode()
def test_replayed_steps_give_the_bits_of_ordinary_ones(make: Callable[[], PagedCausalLM]) -> None:
    """Guards the text: rows, lengths, pages and wanted rows of every step must be its own, none of the step before."""
    plain, fast = make(), make()
    made = captured(fast)
    replayed = 0
    for spans in steps(1):
        before = made.replays
        assert torch.equal(fast.forward(spans), plain.forward(spans))
        small = max(len(span.tokens) for span in spans) <= graphs.MOST_QUERIES and any(span.wanted for span in spans)
        assert (made.replays > before) == fast.replayed == (small and sum(len(span.tokens) for span in spans) <= 64)
        replayed += made.replays - before
    assert replayed > 30


@torch.inference_mode()
def test_the_varlen_path_agrees_with_the_gather_path(
    make: Callable[[], PagedCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the reference kernel of this file, and the page tables and lengths that it is given."""
    paged = make()
    monkeypatch.undo()
    gathering = PagedCausalLM(paged.network)
    assert gathering.backend == "gather"
    spans = [Span(0, list(range(40)), 0, 40, list(range(3)), 0, 0), Span(1, list(range(20)), 0, 5, [3, 4], 0, 0)]
    gathering.allocate_kv(BLOCKS)
    expected = gathering.forward(spans)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_reference)
    paged.allocate_kv(BLOCKS)
    torch.testing.assert_close(paged.forward(spans), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_padding_touches_nobodys_keys(make: Callable[[], PagedCausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards every other stream: a replayed step writes its own slots and scratch. Planted: slots left over."""

    fill = StaticInputs.fill

    def leave_slots(self: StaticInputs, batch: Any) -> None:
        batch.slots[batch.tokens :] = batch.slots[batch.tokens - 1] + 1
        fill(self, batch)

    def untouched(*, planted: bool) -> bool:
        network = make()
        made = captured(network)
        monkeypatch.setattr(StaticInputs, "fill", leave_slots if planted else fill)
        assert network.kv is not None
        for layer in network.kv.layers.values():
            layer.keys[:BLOCKS].fill_(7.0)
        many = [Span(index, [1], 3, 1, [index], 0, 0) for index in range(BLOCKS)]
        network.forward(many)
        network.forward([Span(0, [2], 4, 1, [0], 0, 0)])
        keys = network.kv.layers[0].keys[:BLOCKS, :, 0, 0]
        written = (keys != 7.0).nonzero().tolist()
        network.forward([Span(0, [2], 5, 1, [0], 0, 0)])
        again = (keys != 7.0).nonzero().tolist()
        assert made.replays == 3
        return written == sorted([[index, 3] for index in range(BLOCKS)] + [[0, 4]]) and len(again) == len(written) + 1

    assert untouched(planted=False)
    assert not untouched(planted=True)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("fault", "words"),
    [("bits", "other bits"), ("state", "other hidden states 1"), ("page", "other bits"), ("error", "not permitted")],
)
def test_graphs_that_cannot_be_trusted_are_given_up(
    make: Callable[[], PagedCausalLM],
    fault: str,
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards a start on a device that captures wrongly or not at all: served without graphs, and said."""

    class Faulty(Again):
        def record(self, run: Replay) -> Replay:
            if fault == "error":
                raise RuntimeError("operation not permitted when stream is capturing")
            run()

            def replay() -> None:
                run()
                if fault == "bits":
                    made[0]._logits[3, 5] += 1e-6
                if fault == "state":
                    made[0]._kept[1][2, 3] += 1e-6

            return replay

    fill = StaticInputs.fill

    def wrong_page(self: StaticInputs, batch: Any) -> None:
        fill(self, batch)
        self._table[:, 1:] = 0

    if fault == "page":
        monkeypatch.setattr(StaticInputs, "fill", wrong_page)
    plain, fast = make(), make()
    states = HiddenStates(fast.network)
    states.want((1,))
    made = [Graphs(fast, states, Faulty(), most_rows=64, most_streams=24, longest=LONGEST)]
    assert not made[0].capture()
    assert "not replayed" in caplog.text
    assert words in caplog.text
    fast.graphs = made[0]
    for spans in steps(2, 10):
        assert torch.equal(fast.forward(spans), plain.forward(spans))
    assert not made[0].replays


@torch.inference_mode()
@pytest.mark.parametrize("late", [False, True])
def test_hidden_states_come_from_replayed_steps_too(make: Callable[[], PagedCausalLM], late: bool) -> None:
    """Guards the features of a head: those of this step, also where they are asked for after the capture."""
    layers = (1, 2)
    plain, fast = make(), make()
    expected, made = HiddenStates(plain.network), captured(fast, want=() if late else layers)
    expected.want(layers)
    states = made._states
    for number, spans in enumerate(steps(3, 20)):
        if number == 5:
            states.want(layers)
        assert torch.equal(fast.forward(spans), plain.forward(spans))
        if number >= 5 or not late:
            rows = sum(len(span.tokens) for span in spans)
            for layer in layers:
                assert torch.equal(states.latest(layer)[:rows], expected.latest(layer)[:rows])
    assert made.replays > 10


def test_sizes_are_those_that_batches_are_padded_to() -> None:
    """Guards against a step whose products have another shape, and so other bits, than without graphs."""
    sizes = list(graphs._sizes(RowRule(16, 16), 256, 40))
    assert sizes[0] == (256, graphs.MOST_QUERIES)
    assert {rows for rows, _ in sizes} == {RowRule(16, 16).pad(rows) for rows in range(1, 257)}
    assert [rows for rows, queries in sizes if queries == 1] == [48, 32, 16]


@torch.inference_mode()
def test_a_stream_longer_than_the_page_table_is_computed_as_ever(make: Callable[[], PagedCausalLM]) -> None:
    """Guards the step against a table without room, and models against positions in the proof that they do not have."""
    plain, fast = make(), make()
    made = Graphs(fast, HiddenStates(fast.network), Again(), most_rows=64, most_streams=24, longest=40)
    assert made.capture()
    fast.graphs = made
    for start, replays in ((0, 1), (38, 2), (39, 2)):
        spans = [Span(0, [1, 2], start, 2, [0], 0, 0)]
        assert torch.equal(fast.forward(spans), plain.forward(spans))
        assert made.replays == replays


@pytest.mark.parametrize(("rows", "longest"), [(16, 1024), (256, 1024), (512, 1024), (64, 40), (512, 300)])
@pytest.mark.parametrize("queries", [1, graphs.MOST_QUERIES])
def test_the_proof_of_a_size_fills_it_within_the_scratch_block(rows: int, longest: int, queries: int) -> None:
    """Guards the start against positions that a model does not have, and the proof against a slot that is written with
    two values, of which nobody knows which one stays."""
    network: Any = SimpleNamespace(block_size=256, vocab_rows=VOCAB)
    spans = graphs._proof(graphs.Size(rows, queries), network, 9, longest)
    assert sum(len(span.tokens) for span in spans) == rows - 1
    assert any(len(span.blocks) == 2 for span in spans) == (longest >= 512)
    written: dict[int, tuple[int, int]] = {}
    for span in spans:
        assert 1 <= len(span.tokens) <= queries
        assert set(span.blocks) == {9}
        for position, token in enumerate(span.tokens, span.start):
            assert 0 < position < min(longest, 256 * len(span.blocks))
            assert written.setdefault(position % 256, (position, token)) == (position, token)


def test_texts_and_proposals_are_those_of_a_model_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the whole way from the configuration on: plain runs, rounds of random length and drafting."""
    monkeypatch.setattr(varlen, "varlen_attn", varlen_reference)
    monkeypatch.setattr(causal_lm, "varlen_obstacle", lambda shape: None)
    monkeypatch.setattr(capture, "obstacle", lambda network: None)
    monkeypatch.setattr(capture, "CudaRecorder", lambda device: Again())
    monkeypatch.setattr(causal_lm, "PACKED_FLOAT32_RULE", RULE)
    folder = tiny_llama(tmp_path, vocab=VOCAB)

    def load(**settings: Any) -> LoadedModel:
        kv = {"kv_cache_tokens": 16 * 256, "max_num_batched_tokens": 64, "max_num_seqs": 8}
        model = load_model(EngineConfig(model=str(folder), dtype="float32", threads=1, **kv, **settings))
        model.allocate_kv(model.num_blocks)
        return model

    plain, fast = load(enforce_eager=True), load(max_cudagraph_capture_size=48)
    assert (plain.info.attention_backend, fast.info.attention_backend) == ("varlen", "varlen+graphs")
    graphs_ = fast._network.graphs
    assert graphs_ is not None
    params = SamplingParams(temperature=0.0, max_tokens=10_000)

    def streams() -> list[Stream]:
        return [Stream(index, [3, index + 1] * (index + 1), params, rule=Rule.STANDARD) for index in range(3)]

    def target(model: LoadedModel) -> Target:
        return Target(model, num_blocks=16, block_size=256)

    alone, together, plainly = streams(), streams(), streams()
    decode(target(plain), alone, nothing, 30)
    before = graphs_.replays
    decode(target(fast), plainly, nothing, 30)
    assert graphs_.replays >= before + 29
    reference = {stream.stream_id: stream.text for stream in alone}
    decode(target(fast), together, guesses(reference, VOCAB, seed=3), 30)
    assert [stream.text[:30] for stream in plainly] == [stream.text[:30] for stream in alone]
    assert [stream.text[:30] for stream in together] == [stream.text[:30] for stream in alone]
    assert sum(stream.accepted for stream in together) > 20

    before = graphs_.replays
    proposals = []
    for model in (plain, fast):
        opens = tuple(open_stream(index, [5, 17, index], params) for index in range(3))
        items = [Item(index, [5, 17, index]) for index in range(3)]
        proposals.append(Bench(model).propose(propose(items, 5, opens=opens)))
    assert proposals[0] == proposals[1]
    assert graphs_.replays == before + 5


def test_the_cpu_captures_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards a start without a GPU, which says so to who asks for graphs, and the limit of the option."""
    caplog.set_level("INFO")
    for rows in (None, 32):
        model = load_model(
            EngineConfig(model=str(tiny_llama(tmp_path)), kv_cache_tokens=512, max_cudagraph_capture_size=rows)
        )
        model.allocate_kv(model.num_blocks)
        assert model.info.attention_backend == "gather"
        assert ("not replayed from CUDA graphs: device cpu" in caplog.text) == (rows is not None)
    with pytest.raises(InvalidArgument, match="max_cudagraph_capture_size"):
        EngineConfig(model="m", max_cudagraph_capture_size=513)


def test_what_is_captured_follows_the_streams_and_their_slots() -> None:
    """Guards verify steps against running without graphs, and drafts against capturing what they never run."""

    def rows(**settings: Any) -> int:
        return EngineConfig(model="m", **settings).graph_rows

    assert rows(max_num_seqs=64, logits_rows=64 * 6) == 384
    assert rows(max_num_seqs=64, logits_rows=64 * 33) == 512
    assert (rows(max_num_seqs=64), rows(max_num_seqs=8), rows(max_num_seqs=8, max_num_batched_tokens=12)) == (
        128,
        16,
        12,
    )
    assert rows(max_num_seqs=8, max_cudagraph_capture_size=300) == 300


def test_gpus_keep_room_for_graphs() -> None:
    """Guards against a pool that leaves nothing for them."""

    def held(rows: int | None, *, captures: bool = True) -> int:
        config = EngineConfig(model="m", device="cuda", max_cudagraph_capture_size=rows)
        return Workspace.of(config, vocab_rows=1000, widest=100, itemsize=2, copies=8, captures=captures).graphs

    assert held(512) > held(None) == held(128) == held(16) > 0
    assert not held(None, captures=False)
