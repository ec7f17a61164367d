"""What the target tells a draft of its hidden states: the right layers, the right positions, nothing computed twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from outrider.engine.config import EngineConfig
from outrider.engine.model import LoadedModel, load_model
from outrider.engine.stub import parse
from outrider.engine.stub_model import load_stub
from outrider.errors import Status
from outrider.features import FeatureBlock, FeatureRequest
from outrider.sampling import Rule, SamplingParams
from target_service.features import FeatureKeeper, FeatureRing
from tests.unit.target_driver import Draft, Stream, Target, Wish, close, plain, verify
from tests.unit.tiny import tiny_llama

LAYERS, WINDOW = (0, 2, 3, 4), 16
REQUEST = FeatureRequest(LAYERS, WINDOW)
GREEDY = SamplingParams(temperature=0.0, max_tokens=1_000)
SAMPLED = SamplingParams(max_tokens=1_000)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("features"), vocab=64, layers=4, hidden=32, max_positions=512)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    torch.set_num_threads(1)
    loaded = load_model(EngineConfig(model=str(folder), dtype="float32", kv_cache_tokens=4096, threads=1))
    loaded.allocate_kv(loaded.num_blocks)
    return loaded


@pytest.fixture(scope="module")
def network(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def expected(network: torch.nn.Module, tokens: list[int]) -> NDArray[np.float32]:
    """[tokens, layers * hidden] by one plain pass over all tokens."""
    with torch.inference_mode():
        states = network(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in LAYERS], dim=1).numpy()


def values(block: FeatureBlock) -> NDArray[np.float32]:
    return torch.from_numpy(block.rows.copy()).view(torch.bfloat16).float().numpy()


def check(network: torch.nn.Module, block: FeatureBlock | None, tokens: list[int], first: int, end: int) -> None:
    """The block holds exactly the rows [first, end) of a stream with these tokens."""
    assert block is not None
    assert (block.first, block.end) == (first, end)
    np.testing.assert_allclose(values(block), expected(network, tokens)[first:end], rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.COUPLED])
def test_rounds_bring_the_rows_of_what_was_accepted(
    model: LoadedModel, network: torch.nn.Module, params: SamplingParams, rule: Rule
) -> None:
    """Guards acceptance: a row off by one, or one of a rejected token, makes every later proposal worse.

    The draft guesses right (what plain decoding gave) for a while and wrong from a random slot on.
    """
    reference = Stream(1, PROMPT, params, rule, seed=5)
    target = Target(model, max_num_batched_tokens=12)
    target.send(plain([reference], 40))
    for verdict in target.settle():
        reference.accept(verdict, None)

    rng = np.random.default_rng(0)
    stream = Stream(2, PROMPT, params, rule, seed=5)
    target.send(plain([stream], 1, wish=Wish(REQUEST, [0])))
    (verdict,) = target.settle()
    stream.accept(verdict, None)
    check(network, verdict.features, stream.tokens, len(PROMPT) - WINDOW, len(PROMPT))
    have = len(PROMPT)
    while len(stream.text) < 32:
        start = len(stream.text)
        x = reference.text[start : start + int(rng.integers(1, 6))]
        wrong = int(rng.integers(0, len(x) + 1))
        x = [*x[:wrong], *((token + 1) % 64 for token in x[wrong:])]
        committed = len(stream.tokens)
        target.send(verify([(stream, Draft(x))], wish=Wish(REQUEST, [have])))
        (verdict,) = target.settle()
        k = stream.accept(verdict, Draft(x))
        own_tokens = rule is Rule.COUPLED or params.greedy
        sent = committed + (k if own_tokens else len(x))
        assert verdict.features is not None and verdict.features.end == sent
        have = committed + k
        check(network, verdict.features.before(have), stream.tokens, committed - 1, have)


def test_the_rows_of_a_plain_run_are_kept_and_come_when_asked_for(model: LoadedModel, network: torch.nn.Module) -> None:
    """Guards the way back from plain decoding, and a draft's restart: both find the last window of rows."""
    target = Target(model)
    stream = Stream(1, PROMPT, GREEDY)
    target.send(plain([stream], 1, wish=Wish(REQUEST, [0])))
    stream.accept(target.settle()[0], None)
    target.send(plain([stream], 9))
    for verdict in target.settle():
        assert verdict.features is None
        stream.accept(verdict, None)
    target.send(plain([stream], 2, wish=Wish(REQUEST, [len(PROMPT) + 4])))
    first, last = target.settle()
    stream.accept(first, None)
    stream.accept(last, None)
    assert first.features is None, "a run brings its rows with its last token"
    check(network, last.features, stream.tokens, len(PROMPT) + 4, len(stream.tokens) - 1)
    fed = sum(len(step) for step in target.steps)
    target.send(plain([stream], 1, wish=Wish(REQUEST, [0])))
    (verdict,) = target.settle()
    stream.accept(verdict, None)
    check(network, verdict.features, stream.tokens, len(stream.tokens) - 1 - WINDOW, len(stream.tokens) - 1)
    assert sum(len(step) for step in target.steps) == fed + 1, "nothing is computed again"


def test_a_draft_that_comes_late_gets_a_whole_window(model: LoadedModel, network: torch.nn.Module) -> None:
    """Guards the first proposals of a draft that is attached to streams under way, and the text behind it."""
    texts = []
    for late in (False, True):
        target, stream = Target(model), Stream(1, PROMPT, SAMPLED, seed=2)
        target.send(plain([stream], 5))
        for verdict in target.settle():
            stream.accept(verdict, None)
        target.send(plain([stream], 6, wish=Wish(REQUEST, [0]) if late else None))
        for verdict in target.settle():
            stream.accept(verdict, None)
        if late:
            check(network, verdict.features, stream.tokens, len(stream.tokens) - 1 - WINDOW, len(stream.tokens) - 1)
        texts.append(stream.text)
    assert texts[0] == texts[1]


def test_an_evicted_stream_gets_its_rows_again(model: LoadedModel, network: torch.nn.Module) -> None:
    """Guards preemption: the ring of a stream that is opened anew holds what is computed anew."""
    target = Target(model)
    stream = Stream(1, PROMPT, GREEDY)
    target.send(plain([stream], 6, wish=Wish(REQUEST, [0])))
    for verdict in target.settle():
        stream.accept(verdict, None)
    target.send(close(1))
    stream.lost()
    target.send(plain([stream], 1, wish=Wish(REQUEST, [0])))
    (verdict,) = target.settle()
    stream.accept(verdict, None)
    check(network, verdict.features, stream.tokens, len(stream.tokens) - 1 - WINDOW, len(stream.tokens) - 1)
    target.send(close(1))
    target.settle()
    assert target.verifier.features.held_bytes == 0


class Spy:
    """A model that keeps the logits of its passes."""

    def __init__(self, model: LoadedModel) -> None:
        self.info = model.info
        self.logits: list[torch.Tensor] = []
        self._model = model

    def forward(self, spans: Any) -> torch.Tensor:
        self.logits.append(self._model.forward(spans))
        return self.logits[-1]


def test_the_text_is_the_same_bits_with_and_without_features(model: LoadedModel) -> None:
    """Guards exactness: looking at hidden states must not change how a pass is computed."""
    answers = []
    for wish in (None, Wish(REQUEST, [0])):
        target, stream = Target(model), Stream(1, PROMPT, SAMPLED, seed=3)
        target.model = spy = Spy(model)
        target.send(plain([stream], 8, wish=wish))
        answers.append(([verdict.bonus for verdict in target.settle()], torch.cat(spy.logits)))
    assert answers[0][0] == answers[1][0]
    assert torch.equal(answers[0][1], answers[1][1])


def test_a_wish_that_cannot_be_met_costs_the_features_only(model: LoadedModel) -> None:
    """Guards the text: a stub target, or a layer that there is not, must not fail a stream for its draft's sake."""
    for target, request in (
        (Target(load_stub(parse("stub:script?tokens=1,2,3&vocab=64"))), REQUEST),
        (Target(model), FeatureRequest((1, 5), 8)),
    ):
        target.send(plain([Stream(1, PROMPT, GREEDY)], 1, wish=Wish(request, [0])))
        (verdict,) = target.settle()
        assert (verdict.status, verdict.features) == (Status.OK, None)


def test_rings_are_bounded_together(model: LoadedModel) -> None:
    """Guards the target's memory: what does not fit costs its stream the draft, not the target its life."""
    size = FeatureRing(REQUEST, REQUEST.row_bytes(model.hidden_states.width)).nbytes
    keeper = FeatureKeeper(model.hidden_states, most_bytes=size)
    ring = keeper.ring(REQUEST)
    assert ring is not None and keeper.held_bytes == size
    assert keeper.ring(REQUEST) is None
    keeper.release(ring)
    assert keeper.ring(REQUEST) is not None


def test_a_ring_holds_what_seven_boxes_would() -> None:
    """Guards the ring's arithmetic under random puts and cuts: box p modulo 7 holds the last row put at such a p."""
    rng = np.random.default_rng(1)
    ring, end = FeatureRing(FeatureRequest((0,), 4), 2, spare=3), 0
    boxes: dict[int, tuple[int, NDArray[np.uint8]]] = {}
    for _ in range(500):
        if rng.random() < 0.3:
            end = max(0, end - int(rng.integers(0, 4)))
            ring.cut(end)
        is_gap = rng.random() < 0.05
        first = end + 3 if is_gap else end
        new = rng.integers(0, 256, (int(rng.integers(1, 12)), 2), np.uint8)
        ring.put(first, new)
        boxes = {} if is_gap else {box: (p, row) for box, (p, row) in boxes.items() if p < first}
        boxes |= {(first + index) % 7: (first + index, row) for index, row in enumerate(new)}
        end = first + len(new)
        start = max(0, end - int(rng.integers(1, 12)))
        block = ring.block(start, end)
        held = dict(sorted(boxes.values(), key=lambda entry: entry[0]))
        assert block is not None
        assert list(range(block.first, block.end)) == [p for p in held if p >= max(start, end - 4)]
        for position, row in zip(range(block.first, block.end), block.rows, strict=True):
            np.testing.assert_array_equal(row, held[position])
