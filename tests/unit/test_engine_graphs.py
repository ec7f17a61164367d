"""Captured steps against ordinary ones, on the CPU (tests/unit/replaying.py); `tests/gpu` has the real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine import graphs, varlen
from outrider.engine.batch import RowRule
from outrider.engine.causal_lm import PagedCausalLM
from outrider.engine.graphs import Graphs
from outrider.engine.hidden_states import HiddenStates
from outrider.engine.recorder import Recorder, Replay
from outrider.engine.span import Span
from outrider.engine.static_inputs import StaticInputs
from tests.unit.replaying import BLOCKS, RULE, VOCAB, Again, on_the_varlen_path, steps, varlen_reference
from tests.unit.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

LONGEST = 1024
States = tuple[int, ...]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], PagedCausalLM]:
    """Equal networks on the varlen path, each with KV of its own."""
    on_the_varlen_path(monkeypatch)
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
    made = Graphs(network, states, recorder or Again(states), most_rows=64, most_streams=24, longest=LONGEST)
    made.capture()
    network.graphs = made
    return made


@torch.inference_mode()
def test_replayed_steps_give_the_bits_of_ordinary_ones(make: Callable[[], PagedCausalLM]) -> None:
    """Guards the text: rows, lengths, pages and wanted rows of every step must be its own, none of the step before."""
    plain, fast = make(), make()
    made = captured(fast)
    replayed = 0
    last = expected = torch.empty(0)
    for spans in steps(1):
        before = made.replays
        logits = fast.forward(spans)
        assert torch.equal(last, expected)  # a step leaves alone what the one before returned
        last, expected = logits, plain.forward(spans)
        assert torch.equal(last, expected)
        small = max(len(span.tokens) for span in spans) <= graphs.MOST_QUERIES and any(span.wanted for span in spans)
        assert (made.replays > before) == fast.replayed == (small and sum(len(span.tokens) for span in spans) <= 64)
        replayed += made.replays - before
    assert replayed > 30
    fast.allocate_kv(BLOCKS)
    assert fast.graphs is None  # they read and write the pool that is gone


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
