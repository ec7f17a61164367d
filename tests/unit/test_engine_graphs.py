"""Captured steps, on the CPU: a recorder that runs the captured function again on the same fixed memory stands for the
GPU's, and a plain loop over sequences for its attention kernel. `tests/gpu` has the real ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from outrider.engine import causal_lm, graphs, varlen
from outrider.engine.batch import RowRule
from outrider.engine.causal_lm import PagedCausalLM
from outrider.engine.config import EngineConfig
from outrider.engine.graphs import Graphs
from outrider.engine.hidden_states import HiddenStates
from outrider.engine.memory_plan import Workspace
from outrider.engine.model import load_model
from outrider.engine.span import Span
from outrider.engine.static_inputs import StaticInputs
from outrider.errors import InvalidArgument
from tests.unit.tiny import tiny_llama

VOCAB = 128
BLOCKS = 8
RULE = RowRule(16, 16)
LONGEST = 1024
States = tuple[int, ...]


class Again:
    """Runs the function as the GPU would repeat what it launched: from fixed memory to fixed memory."""

    def record(self, run: graphs.Replay) -> graphs.Replay:
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


def captured(network: PagedCausalLM, recorder: graphs.Recorder | None = None, want: States = ()) -> Graphs:
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
        assert (made.replays > before) == (small and sum(len(span.tokens) for span in spans) <= 64)
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

    def untouched() -> bool:
        network = make()
        captured(network)
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
        return written == sorted([[index, 3] for index in range(BLOCKS)] + [[0, 4]]) and len(again) == len(written) + 1

    assert untouched()

    fill = StaticInputs.fill

    def leave_slots(self: StaticInputs, batch: Any) -> None:
        batch.slots[batch.tokens :] = batch.slots[batch.tokens - 1] + 1
        fill(self, batch)

    monkeypatch.setattr(StaticInputs, "fill", leave_slots)
    assert not untouched()


@torch.inference_mode()
@pytest.mark.parametrize("fault", ["bits", "error"])
def test_graphs_that_cannot_be_trusted_are_given_up(
    make: Callable[[], PagedCausalLM], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a start on a device that captures wrongly or not at all: served without graphs, and said."""

    class Faulty(Again):
        def record(self, run: graphs.Replay) -> graphs.Replay:
            if fault == "error":
                raise RuntimeError("operation not permitted when stream is capturing")
            run()

            def replay() -> None:
                run()
                made[0]._logits[3, 5] += 1e-6

            return replay

    plain, fast = make(), make()
    made = [Graphs(fast, HiddenStates(fast.network), Faulty(), most_rows=64, most_streams=24, longest=LONGEST)]
    assert not made[0].capture()
    assert "not replayed" in caplog.text
    assert ("other bits" if fault == "bits" else "not permitted") in caplog.text
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


def test_the_cpu_captures_nothing(tmp_path: Path) -> None:
    """Guards a start without a GPU, and the limit of the option."""
    model = load_model(EngineConfig(model=str(tiny_llama(tmp_path)), kv_cache_tokens=512))
    model.allocate_kv(model.num_blocks)
    assert model.info.attention_backend == "gather"
    with pytest.raises(InvalidArgument, match="max_cudagraph_capture_size"):
        EngineConfig(model="m", max_cudagraph_capture_size=257)


def test_gpus_keep_room_for_graphs() -> None:
    """Guards against a pool that leaves nothing for them."""

    def held(config: EngineConfig) -> int:
        return Workspace.of(config, vocab_rows=1000, widest=100, itemsize=2, copies=8).graphs

    assert held(EngineConfig(model="m", device="cuda")) > held(
        EngineConfig(model="m", device="cuda", max_cudagraph_capture_size=16)
    )
    assert not held(EngineConfig(model="m", device="cuda", enforce_eager=True))
    assert not held(EngineConfig(model="m"))
