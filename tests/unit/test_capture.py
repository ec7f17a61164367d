"""Whether steps are captured, how many, what room they get, and that nobody can tell from text or proposals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.engine import capture, causal_lm
from outrider.engine.config import EngineConfig
from outrider.engine.memory_plan import Workspace
from outrider.engine.model import LoadedModel, load_model
from outrider.errors import InvalidArgument
from outrider.sampling import Rule, SamplingParams
from tests.service.harness import Item, open_stream, propose
from tests.unit.drafting import Bench
from tests.unit.replaying import RULE, VOCAB, Again, on_the_varlen_path
from tests.unit.target_driver import Stream, Target, decode, guesses, nothing
from tests.unit.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")


def test_texts_and_proposals_are_those_of_a_model_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the whole way from the configuration on: plain runs, rounds of random length and drafting."""
    on_the_varlen_path(monkeypatch)
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
