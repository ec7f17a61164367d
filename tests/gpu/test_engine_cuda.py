"""The engine on a CUDA device: the same assertions as on the CPU, on both attention paths."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.engine import capture
from outrider.engine.batch import Span
from outrider.engine.causal_lm import PagedCausalLM
from outrider.engine.config import EngineConfig
from outrider.engine.draws import inverted, residual
from outrider.engine.edits import RowContext
from outrider.engine.invariance import check_invariance
from outrider.engine.kv_cache import LayerShape
from outrider.engine.logits import process
from outrider.engine.model import LoadedModel, load_model
from outrider.engine.probe import probe_error
from outrider.engine.recorder import CudaRecorder, Replay
from outrider.engine.stopwatch import Stopwatch
from outrider.engine.varlen import MIN_CAPABILITY, varlen_obstacle
from outrider.errors import InvalidArgument
from outrider.sampling import SamplingParams
from tests.unit.replaying import steps
from tests.unit.test_engine_attention import ARCHITECTURES, config_of
from tests.unit.tiny import tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

DEVICE = "cuda:0"


def needs_varlen() -> None:
    if torch.cuda.get_device_capability(DEVICE) < MIN_CAPABILITY:
        pytest.skip("paged FlashAttention needs compute capability 8.0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), vocab=256, hidden=128, heads=4, kv_heads=2)


def load(folder: Path, dtype: torch.dtype) -> PagedCausalLM:
    return PagedCausalLM(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_gather_path_agrees_with_the_plain_forward(name: str) -> None:
    """Guards float32, soft caps and devices below capability 8.0."""
    torch.manual_seed(3)
    network = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32).to(DEVICE)
    assert probe_error(PagedCausalLM(network)) < 1e-4


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_the_varlen_path_agrees_with_the_plain_forward(name: str) -> None:
    """Guards page tables, sliding windows and grouped heads of paged FlashAttention."""
    needs_varlen()
    torch.manual_seed(3)
    network = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float16).to(DEVICE)
    paged = PagedCausalLM(network)
    assert paged.backend == "varlen"
    assert probe_error(paged) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits_do_not_depend_on_chunking_or_company(folder: Path, dtype: torch.dtype) -> None:
    """Guards the equality of text with and without speculation, bit for bit, wherever the start-up test claims it."""
    network = load(folder, dtype)
    verdict = check_invariance(network, 512)
    if not verdict.invariant:
        pytest.skip(f"this device is reported as not batch-invariant: {verdict.note}")
    network.allocate_kv(64)
    rng = random.Random(7)
    ids = [rng.randrange(256) for _ in range(300)]
    blocks = list(range(32)) if network.block_size < 256 else [3, 1]
    mate = list(range(32, 64)) if network.block_size < 256 else [5, 6]
    expected = network.forward([Span(0, ids, 0, 300, blocks, 0, 0)])
    start = 0
    for rows in [200, *[1] * 10, *[5] * 10, 9, 9, 22]:
        spans = [Span(0, ids[start : start + rows], start, rows, blocks, 0, 0), Span(1, ids[:7], 0, 1, mate, 0, 0)]
        assert torch.equal(network.forward(spans)[:rows], expected[start : start + rows])
        start += rows


def test_loading_reports_the_device_and_plans_its_memory(folder: Path) -> None:
    """Guards the memory plan and what operators read in GetInfo."""
    model = load_model(EngineConfig(model=str(folder), device=DEVICE, gpu_memory_utilization=0.2))
    model.allocate_kv(model.num_blocks)
    assert model.info.device_uuid not in ("", "cpu")
    free, total = torch.cuda.mem_get_info(DEVICE)
    assert free > 0.7 * total


def test_pages_that_flash_attention_cannot_read_are_refused(folder: Path) -> None:
    """Guards against an error from deep inside a kernel."""
    needs_varlen()
    with pytest.raises(InvalidArgument, match="multiples of 256"):
        load_model(EngineConfig(model=str(folder), device=DEVICE, dtype="float16", block_size=16))


def test_a_soft_cap_takes_the_gather_path() -> None:
    """Guards against a kernel that drops the cap."""
    shape = LayerShape(4, 2, 64, 64, None, 50.0, torch.float16, torch.device(DEVICE))
    assert varlen_obstacle(shape) is not None


@torch.inference_mode()
def test_steps_replayed_from_graphs_give_the_bits_of_ordinary_ones(folder: Path) -> None:
    """Guards the text: the same assertion as tests/unit/test_engine_graphs.py makes without a card."""
    needs_varlen()

    def load_with(*, eager: bool) -> LoadedModel:
        model = load_model(
            EngineConfig(
                model=str(folder), device=DEVICE, dtype="bfloat16", kv_cache_tokens=8 * 256, enforce_eager=eager
            )
        )
        model.allocate_kv(8)
        return model

    plain, fast = load_with(eager=True), load_with(eager=False)
    assert plain.info.attention_backend == "varlen"
    assert fast.info.attention_backend == "varlen+graphs"
    for model in (plain, fast):
        model.hidden_states.want((1,))
    for spans in steps(1):
        assert torch.equal(fast.forward(spans), plain.forward(spans))
        rows = sum(len(span.tokens) for span in spans)
        assert torch.equal(fast.hidden_states.latest(1)[:rows], plain.hidden_states.latest(1)[:rows])
    assert fast._network.graphs is not None
    assert fast._network.graphs.replays > 30


@torch.inference_mode()
@pytest.mark.parametrize("eager", [False, True])
def test_nothing_is_read_before_all_that_is_drawn(folder: Path, eager: bool) -> None:
    """Guards the one wait of a step, replayed or not: from the spans to what is drawn nobody reads the device."""
    needs_varlen()
    model = load_model(
        EngineConfig(model=str(folder), device=DEVICE, dtype="bfloat16", kv_cache_tokens=8 * 256, enforce_eager=eager)
    )
    model.allocate_kv(8)
    spans = [Span(stream, [3, 1, 4], 0, 3, [stream], 1, 1) for stream in range(4)]
    rows = [RowContext(SamplingParams(temperature=0.7), [3, 1, 4], 3, 1)] * 12
    u, at = np.full(12, 0.3), np.arange(12)
    model.forward(spans)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        p, faults = process(model.forward(spans), rows)
        drawn = inverted(residual(p, at, at, np.full(12, 0.25)), u)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert model.replayed is not eager
    assert drawn.shape == (12,) and not faults


@pytest.mark.parametrize("device", [DEVICE, "cpu"])
def test_the_time_of_a_pass_is_the_devices(device: str) -> None:
    """Guards cost tables against the time of queueing kernels; a model whose first layer is elsewhere is waited for."""
    watch, began = Stopwatch(device), time.monotonic()
    torch.cuda._sleep(200_000_000)
    measure = watch.stop(torch.ones(1, device=DEVICE))
    queued_ms = 1_000 * (time.monotonic() - began)
    assert measure() > 20
    assert (queued_ms < measure() / 2) == (device == DEVICE)


class _Unchecked(CudaRecorder):
    """Leaves a pass that reads the device to the capture itself."""

    def record(self, run: Replay) -> Replay:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
            return super().record(run)


@pytest.mark.parametrize("recorder", [CudaRecorder, _Unchecked])
def test_a_pass_that_reads_the_device_is_not_captured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, recorder: type[CudaRecorder]
) -> None:
    """Guards the start with a model that cannot be captured, and the device after a capture that failed."""
    needs_varlen()
    run = PagedCausalLM.run

    def reading(self: PagedCausalLM, ids: Tensor, *rest: Any) -> Tensor:
        assert int(ids.sum()) >= 0
        return run(self, ids, *rest)

    monkeypatch.setattr(PagedCausalLM, "run", reading)
    monkeypatch.setattr(capture, "CudaRecorder", recorder)
    model = load_model(EngineConfig(model=str(folder), device=DEVICE, dtype="bfloat16", kv_cache_tokens=8 * 256))
    stream = torch.cuda.current_stream(DEVICE)
    model.allocate_kv(8)
    assert model.info.attention_backend == "varlen"
    assert torch.cuda.current_stream(DEVICE) == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    assert model.forward([Span(0, [1, 2, 3], 0, 1, [0], 0, 0)]).isfinite().all()
