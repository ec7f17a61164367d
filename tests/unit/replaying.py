"""Replayed steps without a GPU: a recorder that runs the captured function again on the same fixed memory stands for
CUDA graphs, and a plain loop over sequences for the attention kernel."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine import causal_lm, varlen
from outrider.engine.batch import RowRule
from outrider.engine.hidden_states import HiddenStates
from outrider.engine.recorder import Replay
from outrider.engine.span import Span

VOCAB = 128
BLOCKS = 8
RULE = RowRule(16, 16)
"""The first that GPUs try."""


class Again:
    """Runs the function as the GPU would repeat what it launched: from fixed memory to fixed memory.

    Args:
        states: of the network. They stay as they were, because a GPU calls no hook when it replays.
    """

    def __init__(self, states: HiddenStates | None = None) -> None:
        self._states = states

    def record(self, run: Replay) -> Replay:
        run()

        def replay() -> None:
            seen = {} if self._states is None else {layer: self._states.latest(layer) for layer in self._states.wanted}
            run()
            if self._states is not None:
                self._states.show(seen)

        return replay


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


def on_the_varlen_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has networks on the CPU take the path that is captured."""
    monkeypatch.setattr(varlen, "varlen_attn", varlen_reference)
    monkeypatch.setattr(causal_lm, "varlen_obstacle", lambda shape: None)


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
