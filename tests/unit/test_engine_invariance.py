"""A position's logits are the same bits whatever the chunking and whoever rides beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine import batch, causal_lm, layout
from outrider.engine.batch import RowRule, Span
from outrider.engine.causal_lm import PagedCausalLM
from outrider.engine.invariance import check_invariance
from outrider.engine.packing import _processor_packs, can_pack, pack_linears
from tests.unit.test_engine_attention import network_of
from tests.unit.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
TOKENS = 330
VOCABULARY = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), vocab=VOCABULARY)


def load(folder: Path, dtype: torch.dtype) -> PagedCausalLM:
    network = PagedCausalLM(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    network.allocate_kv(200)
    return network


def rows_in_company(
    network: PagedCausalLM, ids: Sequence[int], chunks: Sequence[int], rng: random.Random
) -> torch.Tensor:
    """Logits of all positions of `ids`, fed in `chunks` beside up to four other streams."""
    table = rng.sample(range(100), -(-len(ids) // 16))
    found = []
    start = 0
    for chunk in chunks:
        rows = min(chunk, len(ids) - start)
        if not rows:
            break
        spans = [Span(0, ids[start : start + rows], start, rows, table, 0, 0)]
        for mate in range(rng.randrange(5)):
            length = rng.choice([1, 2, 5, 9, 40])
            tokens = [rng.randrange(VOCABULARY) for _ in range(length)]
            blocks = list(range(100 + mate * 20, 120 + mate * 20))
            spans.insert(rng.randrange(len(spans) + 1), Span(mate + 1, tokens, 0, length, blocks, 0, 0))
        parts = network.forward(spans).split([span.wanted for span in spans])
        found.append(next(part for span, part in zip(spans, parts, strict=True) if span.stream_id == 0))
        start += rows
    return torch.cat(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_do_not_depend_on_chunking_or_company(folder: Path, dtype: torch.dtype) -> None:
    """Guards the equality of text with and without speculation, bit for bit."""
    network = load(folder, dtype)
    rng = random.Random(7)
    ids = [rng.randrange(VOCABULARY) for _ in range(TOKENS)]
    expected = rows_in_company(network, ids, [TOKENS], random.Random(0))
    for chunks in ([5] * TOKENS, [3, 7, 1, 9] * TOKENS, [128] * 3, [64, 1, 2, 40, 33] * TOKENS):
        assert torch.equal(rows_in_company(network, ids, chunks, rng), expected), chunks[:5]
    tail = [250, *[1] * TOKENS]
    assert torch.equal(rows_in_company(network, ids, tail, rng), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_start_up_test_passes_where_results_are_invariant(folder: Path, dtype: torch.dtype) -> None:
    """Guards the flag in GetInfo against false alarms."""
    verdict = check_invariance(load(folder, dtype), 96)
    assert verdict.invariant, verdict.note


def test_the_start_up_test_finds_rows_that_are_too_few(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test itself: float32 products of 1-3 rows use other kernels, and it must notice."""
    monkeypatch.setitem(causal_lm.CPU_ROW_RULES, torch.float32, (RowRule(1, 1),))
    verdict = check_invariance(load(folder, torch.float32), 8)
    assert not verdict.invariant
    assert "linear layer" in verdict.note


def test_the_start_up_test_finds_attention_over_a_common_length(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the grouping rule: one KV length for all streams of a step gives other bits."""
    true_segments = batch.RaggedBatch.segments

    def common_length(self: batch.RaggedBatch) -> list[batch.Segment]:
        segments = true_segments(self)
        longest = max(segment.keys for segment in segments)
        return [segment._replace(keys=longest) for segment in segments]

    monkeypatch.setattr(batch.RaggedBatch, "segments", common_length)
    verdict = check_invariance(load(folder, torch.float32), 8)
    assert not verdict.invariant
    assert "attention" in verdict.note


def test_the_start_up_test_finds_left_over_rows_in_attention(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the padding of attention rows, which linear layers do not need."""
    monkeypatch.setattr(layout, "PACKED_MULTIPLE", 1)
    verdict = check_invariance(load(folder, torch.float32), 8)
    assert not verdict.invariant
    assert "attention" in verdict.note


def test_the_start_up_test_moves_to_a_stricter_row_rule(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards machines whose kernels need more rows than this one's."""
    monkeypatch.setitem(causal_lm.CPU_ROW_RULES, torch.float32, (RowRule(1, 1), RowRule(4, 4)))
    network = load(folder, torch.float32)
    assert check_invariance(network, 8).invariant
    assert network.rule == RowRule(4, 4)


def load_packed(folder: Path, dtype: torch.dtype) -> PagedCausalLM:
    if not can_pack(dtype, torch.device("cpu")):
        pytest.skip(f"no packed {dtype} kernels in this torch on this processor")
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert pack_linears(network) == 2 * 7 + 1
    packed = PagedCausalLM(network)
    packed.allocate_kv(200)
    return packed


def test_packed_half_precision_gives_the_same_bits(folder: Path) -> None:
    """Guards the faster weight layout: it must be invisible in results, and invariant itself."""
    packed = load_packed(folder, torch.bfloat16)
    plain = load(folder, torch.bfloat16)
    assert check_invariance(packed, 96).invariant
    packed.allocate_kv(8)
    for rows in (1, 5, 40):
        span = Span(0, list(range(rows)), 0, rows, range(8), 0, 0)
        assert torch.equal(packed.forward([span]), plain.forward([span]))


def test_packed_float32_needs_no_padding_of_rows(folder: Path) -> None:
    """Guards the cost of a plain step: one row stays one row, and its bits are still those of every batch."""
    packed = load_packed(folder, torch.float32)
    assert check_invariance(packed, 96).invariant
    assert packed.rule == RowRule(1, 1)
    packed.allocate_kv(200)
    ids = [random.Random(3).randrange(VOCABULARY) for _ in range(TOKENS)]
    expected = rows_in_company(packed, ids, [TOKENS], random.Random(0))
    for chunks in ([5] * TOKENS, [3, 7, 1, 9] * TOKENS, [250, *[1] * TOKENS]):
        assert torch.equal(rows_in_company(packed, ids, chunks, random.Random(1)), expected), chunks[:5]


def test_one_plain_layer_brings_the_padding_back(folder: Path) -> None:
    """Guards layers that could not be packed: their kernels change with the row count."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pack_linears(network)
    network.lm_head = torch.nn.Linear(network.config.hidden_size, VOCABULARY, bias=False)
    assert PagedCausalLM(network).rule == RowRule(4, 1)


@pytest.mark.parametrize(
    "refusal", [RuntimeError("bf16 path needs the cpu support avx512"), AttributeError("no such op")]
)
def test_a_processor_without_packed_kernels_keeps_plain_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    """Guards half precision on processors that oneDNN's packed kernels refuse: slower, but it must load."""

    def refuse(*_: object) -> None:
        raise refusal

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    monkeypatch.setattr("outrider.engine.packing._processor_packs", _processor_packs.__wrapped__)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert pack_linears(network) == 0
    PagedCausalLM(network)


def test_a_packed_layer_that_disagrees_is_left_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against wrong text from a kernel that misreads the layout."""
    monkeypatch.setattr("outrider.engine.packing.PackedLinear.forward", lambda layer, rows: rows[..., :1] * 0 + 1)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert pack_linears(network) == 0


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gemma2"])
def test_experts_and_soft_caps_are_invariant_too(name: str) -> None:
    """Guards experts, whose row counts depend on the batch, and the attention that SDPA has no kernel for."""
    verdict = check_invariance(network_of(name), 16)
    assert verdict.invariant, verdict.note


def test_padded_row_counts_are_all_among_the_tested_sizes() -> None:
    """Guards against a row count in service that the start-up test never tried."""
    for rule in (RowRule(2, 1), RowRule(4, 4), RowRule(16, 16), RowRule(64, 64)):
        sizes = set(rule.sizes(rule.pad(2048)))
        assert {rule.pad(rows) for rows in range(1, 2049)} == sizes
        assert all(rule.pad(rows) <= max(rule.pad(1), 1.25 * rows + rule.multiple) for rows in range(1, 2049))
