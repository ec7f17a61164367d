"""StubModel: a law and a clock behind the interface of a model."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider import noise
from outrider.engine.batch import Span
from outrider.engine.block_manager import Copy
from outrider.engine.config import EngineConfig
from outrider.engine.info import ModelInfo
from outrider.engine.laws import F32, Ids, one_hot
from outrider.engine.stub import StubSpec

_BLOCK_SIZE = 16
_MAX_POSITIONS = 8192
_KV_TOKENS = 1 << 20


class _Rows(NamedTuple):
    """The wanted rows of a step, [n] each."""

    stream_ids: NDArray[np.uint64]
    tokens: Ids
    positions: Ids
    prompt_lengths: Ids
    committed: Ids

    @property
    def slots(self) -> Ids:
        """Which slot of its round the token behind each row fills."""
        return self.positions + 1 - self.committed


class StubModel:
    """Logits of a stub; its KV is accounted for by the services but does not exist.

    Attributes:
        info: facts about it.
        num_blocks: KV blocks there are.
        replayed: no pass is.
    """

    replayed = False

    def __init__(self, spec: StubSpec, info: ModelInfo, num_blocks: int) -> None:
        self.info = info
        self.num_blocks = num_blocks
        self._spec = spec
        self._law = spec.law()

    def allocate_kv(self, num_blocks: int) -> None:
        """Nothing to do: a law remembers no prefix."""

    def copy_kv(self, copies: Sequence[Copy]) -> None:
        """Nothing to do: there is no KV."""

    def forward(self, spans: Sequence[Span]) -> Tensor:
        """float32 logits [sum of wanted, vocab_rows], in span order, after the step's time."""
        until = time.monotonic() + self.step_ms(spans) / 1000
        logits = torch.from_numpy(self._logits(_rows(spans)))
        if (left_s := until - time.monotonic()) > 0:  # even a sleep of nothing gives the core away
            time.sleep(left_s)
        return logits

    def step_ms(self, spans: Sequence[Span]) -> float:
        """What the clock charges for a step."""
        clock = self._spec.clock
        if self._spec.is_draft:
            return clock.token_ms if any(span.wanted for span in spans) else 0.0
        rows = sum(min(span.wanted, max(span.start + len(span.tokens) - span.prompt_len, 0)) for span in spans)
        prompt = sum(len(span.tokens) for span in spans) - rows
        return clock.fixed_ms + clock.token_ms * max(0, rows - clock.free_tokens) + clock.prefill_token_ms * prompt

    def _logits(self, rows: _Rows) -> F32:
        generated = rows.positions + 1 - rows.prompt_lengths
        logits = self._law.right(rows.tokens, generated)
        wrong = self._is_wrong(rows)
        logits[wrong] = one_hot(self._law.wrong(rows.tokens, generated)[wrong], self._law.vocab)
        return logits

    def _is_wrong(self, rows: _Rows) -> NDArray[np.bool_]:
        spec = self._spec
        if spec.k is not None:
            return rows.slots >= spec.k
        if spec.p is not None:
            zero = np.zeros(len(rows.tokens), np.uint32)
            places = (rows.positions + 1).astype(np.uint32)
            return noise.uniforms(rows.stream_ids, places, zero, zero, noise.Role.DRAFT) >= spec.p
        return np.full(len(rows.tokens), spec.kind == "wrong")


def load_stub(spec: StubSpec, config: EngineConfig | None = None) -> StubModel:
    """Makes a stub's model, to be used in the thread that calls this.

    Args:
        spec: what to make.
        config: limits, block size and KV pool; the stub's own generous ones where unset.

    Raises:
        InvalidArgument: the stub's table or ids are unusable.
    """
    limits = EngineConfig(model=spec.name) if config is None else config
    # Its tensors are tiny, and threads that spin for work would disturb whoever is timed against this clock.
    torch.set_num_threads(limits.threads or 1)
    law = spec.law()
    block_size = limits.block_size or _BLOCK_SIZE
    num_blocks = (limits.kv_cache_tokens or _KV_TOKENS) // block_size
    info = ModelInfo(
        model_id=limits.model_id or spec.name,
        revision="stub",
        architecture="Stub",
        vocab_rows=law.vocab,
        parameters=0,
        dtype="float32",
        device="cpu",
        device_name="stub",
        device_uuid=spec.name,
        max_positions=min(limits.max_model_len or _MAX_POSITIONS, num_blocks * block_size),
        num_layers=0,
        kv_bytes_per_token=0,
        eos_token_ids=() if law.eos is None else (law.eos,),
        weight_hash=hashlib.sha256(spec.name.encode()).hexdigest(),
        attention_backend="none",
        invariant=True,
        invariance_note="a law's rows depend on their own prefix only",
        block_size=block_size,
    )
    return StubModel(spec, info, num_blocks)


def _rows(spans: Sequence[Span]) -> _Rows:
    wanted = [span.wanted for span in spans]
    tokens: list[int] = []
    positions: list[int] = []
    for span in spans:
        if span.wanted:
            end = span.start + len(span.tokens)
            tokens.extend(span.tokens[len(span.tokens) - span.wanted :])
            positions.extend(range(end - span.wanted, end))
    return _Rows(
        stream_ids=np.repeat(np.array([span.stream_id for span in spans], np.uint64), wanted),
        tokens=np.array(tokens, np.int64),
        positions=np.array(positions, np.int64),
        prompt_lengths=np.repeat(np.array([span.prompt_len for span in spans], np.int64), wanted),
        committed=np.repeat(np.array([span.committed for span in spans], np.int64), wanted),
    )
