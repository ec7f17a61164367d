"""Steps captured once as CUDA graphs and replayed: a small pass launches thousands of kernels, which takes the host
longer than the GPU needs for them.

Captured are passes of few rows per stream (plain, verify and draft steps of a causal LM) at every padded row count that
the batches' own rule knows, so that a matrix product has the shape, and with it the bits, that it has without a graph.
What differs between steps of one size lies in fixed device memory (`StaticInputs`). Prefill chunks, larger steps and
models that read the device in the middle of a pass (experts, some rotary scalings) run as they always did.

Only the paged variable-length attention is captured: the gather path's calls differ from step to step.

A graph is used only after a replay of it gave the bits of the ordinary pass, over keys and values in the scratch block.
If a capture fails or a bit differs, all graphs are given up with one line in the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outrider.engine.batch import RaggedBatch, RowRule
from outrider.engine.config import MAX_GRAPH_ROWS
from outrider.engine.hidden_states import HiddenStates
from outrider.engine.recorder import Recorder, Replay
from outrider.engine.span import Span
from outrider.engine.static_inputs import StaticInputs

if TYPE_CHECKING:
    from outrider.engine.causal_lm import PagedCausalLM

log = logging.getLogger(__name__)

MOST_QUERIES = 64
"""Rows per stream that one thread block of FlashAttention takes, so that allowing for so many costs nothing."""


class Size(NamedTuple):
    """What steps of one graph have in common.

    Attributes:
        rows: padded rows of the step.
        queries: rows per stream that the attention call allows for: 1 (a kernel of its own) or `MOST_QUERIES`.
    """

    rows: int
    queries: int


class Graphs:
    """The captured steps of one model; used by the engine's thread.

    Attributes:
        replays: steps that were replayed.
    """

    def __init__(
        self,
        network: PagedCausalLM,
        states: HiddenStates,
        recorder: Recorder,
        *,
        most_rows: int,
        most_streams: int,
        longest: int,
    ) -> None:
        """
        Args:
            network: with its KV allocated; used as long as that pool lives.
            states: whoever wants hidden states gets them from replayed steps too.
            recorder: makes the graphs.
            most_rows: rows of a step that is captured.
            most_streams: streams in a step.
            longest: tokens of a stream.
        """
        assert network.kv is not None
        self.replays = 0
        self._network = network
        self._states = states
        self._recorder = recorder
        self._scratch = network.kv.scratch_block
        self._sizes = list(_sizes(network.rule, min(most_rows, MAX_GRAPH_ROWS), most_streams))
        self._longest = longest
        rows = max((size.rows for size in self._sizes), default=0)
        self._inputs = StaticInputs(
            rows, -(-longest // network.block_size), network.block_size, self._scratch, network.device
        )
        self._logits = torch.empty((rows, network.vocab_rows), dtype=network.dtype, device=network.device)
        self._kept: dict[int, Tensor] = {}
        self._replays: dict[Size, Replay] = {}

    @torch.inference_mode()
    def capture(self) -> bool:
        """Captures and proves every size, the largest first, because the smaller ones fit into its memory.

        Returns:
            Whether steps will be replayed.
        """
        began_s = time.monotonic()
        for size in self._sizes:
            if self._replay_of(size) is None:
                return False
        log.info(
            "captured %d step shapes of up to %d rows in %.1f s",
            len(self._sizes),
            self._sizes[0].rows if self._sizes else 0,
            time.monotonic() - began_s,
        )
        return bool(self._sizes)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> Tensor | None:
        """The batch's logits in the model's dtype, valid until the next pass, or None where no graph fits it.

        [rows, vocab_rows]; the first `batch.wanted_count` are those of `batch.wanted`.
        """
        size = self._size_of(batch)
        if size is None:
            return None
        if self._states.wanted != tuple(self._kept):
            self._replays.clear()  # captured without the states that somebody wants since
        replay = self._replay_of(size)
        if replay is None:
            return None
        self._inputs.fill(batch)
        replay()
        self.replays += 1
        if self._kept:
            self._states.show({layer: kept[: size.rows] for layer, kept in self._kept.items()})
        return self._logits[: size.rows]

    def _size_of(self, batch: RaggedBatch) -> Size | None:
        queries = max(len(span.tokens) for span in batch.spans)
        keys = max(span.start - span.dropped + len(span.tokens) for span in batch.spans)
        if not batch.wanted_count or queries > MOST_QUERIES or keys > self._longest:
            return None
        size = Size(batch.rows, 1 if queries == 1 else MOST_QUERIES)
        return size if size in self._sizes else None

    def _replay_of(self, size: Size) -> Replay | None:
        """The graph of a size, captured and proven now if need be; None once graphs were given up."""
        if size in self._replays:
            return self._replays[size]
        try:
            self._inputs.clear()  # what a larger step left there names rows that this one has not
            replay = self._recorder.record(partial(self._run, size, self._states.wanted))
            difference = self._difference(size, replay)
        except Exception as error:  # whatever a library raises where it cannot be captured
            if self._network.device.type == "cuda":
                torch.cuda.synchronize(self._network.device)  # a device that is lost is not to be served from
            difference = str(error).strip().partition("\n")[0]
        if difference is not None:
            log.warning("steps are not replayed from CUDA graphs: %d rows: %s", size.rows, difference)
            self._sizes, self._replays = [], {}
            return None
        self._replays[size] = replay
        return replay

    def _run(self, size: Size, layers: Sequence[int]) -> None:
        """A pass over the fixed inputs, into the fixed outputs: logits, and the hidden states of these layers."""
        inputs = self._inputs.of(size.rows, size.queries)
        logits = self._network.run(inputs.ids, inputs.positions, inputs.wanted, inputs.batch)
        self._logits[: size.rows].copy_(logits)
        for layer in layers:
            state = self._states.latest(layer)
            if layer not in self._kept:
                shape = (self._logits.shape[0], state.shape[1])
                self._kept[layer] = torch.empty(shape, dtype=state.dtype, device=state.device)
            self._kept[layer][: size.rows].copy_(state)

    def _difference(self, size: Size, replay: Replay) -> str | None:
        """How a replay differs from the ordinary pass of the same batch, or None."""
        batch = self._network.batch(_proof(size, self._network, self._scratch, self._longest))
        expected = self._network.eager(batch)[: batch.wanted_count].clone()
        states = {layer: self._states.latest(layer) for layer in self._states.wanted}
        self._inputs.fill(batch)
        for written in (self._logits, *self._kept.values()):
            written.zero_()
        replay()
        if not torch.equal(self._logits[: batch.wanted_count], expected):
            return "a replay gives other bits than the pass that it was captured from"
        for layer, state in states.items():
            if not torch.equal(self._kept[layer][: batch.tokens], state[: batch.tokens]):
                return f"a replay gives other hidden states {layer} than the pass that it was captured from"
        return None


def _proof(size: Size, network: PagedCausalLM, scratch: int, longest: int) -> list[Span]:
    """Streams of few rows each for a step of this size.

    All have their keys and values in the scratch block, one behind the other, so that nobody's are touched; where
    streams can be that long, some see the block twice, as the two pages of their table. Once the block is full the same
    streams come again, and write the same once more. The last row is padding.
    """
    spans: list[Span] = []
    places = min(size.rows, network.block_size, longest)
    row, place, turn = 1, 1, 0
    while row < size.rows:
        count = min(size.queries, 1 + turn % 5, places - place)
        first = network.block_size if turn % 3 == 2 and longest >= 2 * network.block_size else 0
        tokens = [(7 * at + size.rows) % network.vocab_rows for at in range(place, place + count)][: size.rows - row]
        pages = [scratch] * (2 if first else 1)
        spans.append(Span(len(spans), tokens, first + place, len(tokens), pages, 0, 0))
        row, place, turn = row + len(tokens), place + count, turn + 1
        if place == places:
            place, turn = 1, 0
    return spans


def _sizes(rule: RowRule, most_rows: int, most_streams: int) -> Iterator[Size]:
    """Falling."""
    for rows in reversed(list(rule.sizes(most_rows))):
        yield Size(rows, MOST_QUERIES)
        if rows <= rule.pad(most_streams):
            yield Size(rows, 1)
