"""The compiled pass: refusals here, and where `make test-model` runs, texts, hidden states and planted errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from coordinator.served import fingerprint
from draft_service.config import DraftConfig
from outrider.engine import causal_lm, compiled
from outrider.engine.config import EngineConfig
from outrider.engine.invariance import check_invariance, compiled_difference
from outrider.engine.model import LoadedModel, load_model
from outrider.engine.span import Span
from outrider.errors import InvalidArgument
from outrider.sampling import SamplingParams
from tests.scripted_decoder import part_info
from tests.unit.target_driver import Stream, Target, decode, guesses, nothing
from tests.unit.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

COMPILERS = ("g++", "clang++")
VOCAB = 128
ROWS = 128


def load(folder: Path) -> LoadedModel:
    model = load_model(
        EngineConfig(
            model=str(folder),
            dtype="float32",
            threads=1,
            kv_cache_tokens=4096,
            max_num_batched_tokens=ROWS,
            compile=True,
        )
    )
    model.allocate_kv(model.num_blocks)
    return model


def test_what_is_not_compiled_is_refused() -> None:
    """Guards against an option that is taken and does nothing."""
    with pytest.raises(InvalidArgument, match="compile: is for the CPU only"):
        EngineConfig(model="m", device="cuda", compile=True)
    with pytest.raises(InvalidArgument, match="compile: is for draft models; ngram"):
        DraftConfig(model="ngram", port=0, max_slots=4, drain_seconds=0.0, compile=True)


def test_a_pass_that_cannot_be_compiled_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the start on a machine without a compiler: one line, and not a pass that is compiled in part."""

    def failing(*_: Any, **__: Any) -> Any:
        def run(*_: Any) -> Any:
            raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nand much more")

        return run

    monkeypatch.setattr(torch, "compile", failing)
    with pytest.raises(InvalidArgument, match=r"compile: this model's pass .*No working C\+\+ compiler found$"):
        load(tiny_llama(tmp_path, vocab=VOCAB))


def test_a_compiled_target_is_told_apart() -> None:
    """Guards `system_fingerprint` and replicas: the same request may be answered differently."""
    plain, fused = (part_info(attention_backend=backend).arithmetic for backend in ("gather", "gather+compiled"))
    assert (plain, fused) == ("float32", "float32, compiled")
    first, second = (
        fingerprint(model="m", revision="r", weight_hash="w", arithmetic=arithmetic) for arithmetic in (plain, fused)
    )
    assert first != second


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason=f"none of {', '.join(COMPILERS)} is installed")
class TestCompiled:
    """Each compiles a tiny model once, which takes half a minute."""

    def test_texts_do_not_depend_on_the_steps_and_states_are_the_models(self, tmp_path: Path) -> None:
        """Guards exactness: one graph for prompts in pieces, plain steps and rounds; hidden states for drafts."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        folder = tiny_llama(tmp_path, vocab=VOCAB)
        model = load(folder)
        assert model.info.invariant and model.info.attention_backend == "gather+compiled"
        assert "the compiled pass at" in model.info.invariance_note
        params = SamplingParams(temperature=0.0, max_tokens=10_000)

        def streams() -> list[Stream]:
            return [Stream(index, [3, index + 1] * (30 * index + 1), params) for index in range(3)]

        alone, together = streams(), streams()
        for stream in alone:
            decode(Target(model, num_blocks=200, max_num_batched_tokens=ROWS), [stream], nothing, 30)
        reference = {stream.stream_id: stream.text for stream in alone}
        target = Target(model, num_blocks=200, max_num_batched_tokens=40)  # the longest prompt comes in pieces
        decode(target, together, guesses(reference, VOCAB, seed=3), 30)
        assert [stream.text[:30] for stream in together] == [stream.text[:30] for stream in alone]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

        ids = [5, 9, 3, 77, 12, 8]
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            expected = plain(torch.tensor([ids]), output_hidden_states=True)
        logits = model.forward([Span(0, ids, 0, len(ids), [0], 0, 0)])
        torch.testing.assert_close(logits, expected.logits[0], rtol=1e-3, atol=1e-3)
        states = model.hidden_states
        assert states.wanted == tuple(range(states.count + 1))
        for layer in states.wanted:
            torch.testing.assert_close(
                states.latest(layer)[: len(ids)], expected.hidden_states[layer][0], rtol=1e-3, atol=1e-3
            )

    def test_a_prompt_computed_by_other_code_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The planted error: chunks without a wanted row run uncompiled, and leave keys of other bits."""
        model = load(tiny_llama(tmp_path, vocab=VOCAB))
        network = model._network
        assert check_invariance(network, ROWS).invariant
        run = causal_lm.PagedCausalLM.run

        def partly(self: Any, ids: Tensor, positions: Tensor, wanted: Tensor, batch: Any) -> Tensor:
            kept, self.compiled = self.compiled, self.compiled if len(wanted) else None
            try:
                return run(self, ids, positions, wanted, batch)
            finally:
                self.compiled = kept

        monkeypatch.setattr(causal_lm.PagedCausalLM, "run", partly)
        verdict = check_invariance(network, ROWS)
        assert not verdict.invariant and "differ from one pass" in verdict.note

    def test_a_pass_that_looks_at_its_row_count_is_found(self, tmp_path: Path) -> None:
        """The planted error: a row's last bits change with the rows beside it."""
        network = load(tiny_llama(tmp_path, vocab=VOCAB))._network
        honest = network.compiled
        assert honest is not None
        network.compiled = lambda ids, positions, wanted: (
            honest(ids, positions, wanted) * (1.0 + 1e-6 * (ids.shape[1] == 11))
        )
        difference = compiled_difference(network, [])
        assert difference is not None and "compiled pass of 11 rows" in difference
        # A coarser row rule gets around it, as it does where a machine's own kernels do so.
        assert "a multiple of 4" in check_invariance(network, ROWS).note


def test_a_single_row_is_padded() -> None:
    """Guards the one graph: of a single row a compiler makes another one."""
    assert [
        rule.minimum for rule in compiled.rules_for((causal_lm.PACKED_FLOAT32_RULE, causal_lm.RowRule(16, 16)))
    ] == [
        2,
        16,
    ]
