"""A head (EAGLE-3 or MTP) behind the interface of a model: ragged steps over many streams, with KV of its own.

The head's row for position t is fed token t + 1, so that a stream's spans fit it as they fit a causal LM, one position
further left: the span from token index s on is the rows from position s - 1 on, and its logits are q of the token
behind it. Up to the last committed token but one a row is fed with the target's features; behind that, with the head's
own output for the row before. As the layer is the only one, a row's keys and values do not depend on other rows, and a
row whose output nobody reads costs its key and value only.

Keys and values lie in one ring per stream: the window behind the last row with features, and the drafted rows. They are
not rolled back: the next round overwrites what was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.block_manager import Copy
from outrider.engine.feature_store import FeatureStore
from outrider.engine.head import Head
from outrider.engine.info import ModelInfo
from outrider.engine.span import Span
from outrider.engine.transfer import indices, to_device
from outrider.features import FeatureRequest


@dataclass(slots=True)
class _Rows:
    """The rows of a step.

    Attributes:
        ids: token that each is fed.
        positions, seats: of each.
        drafted: rows that are fed the head's own output; all others have features.
        features: bytes of the others' features, in order.
        last: rows whose output is wanted.
        lowest: position below which such a row attends to nothing.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    seats: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    features: list[np.ndarray] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    lowest: list[int] = field(default_factory=list)


class HeadModel:
    """Runs a head. Not thread-safe, the engine's one thread owns it.

    Attributes:
        info: facts about it.
        kind: as in GetInfo, "eagle3" or "mtp".
        features: what the head is fed; whoever makes spans fills it.
        request: which features they are.
        trained_for: name of the target that the head was trained for, or empty.
        kv_tokens: positions whose keys and values there is room for, over all seats.
        target_ids: int64 [draft ids] the target's id of each column of the logits, rising.
        replayed: no pass is.
    """

    replayed = False

    def __init__(
        self,
        head: Head,
        embeddings: Tensor,
        info: ModelInfo,
        features: FeatureStore,
        *,
        kind: str,
        request: FeatureRequest,
        seats: int,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
        trained_for: str = "",
    ) -> None:
        """
        Args:
            head: on its device, in its type, its ids rising.
            embeddings: [vocab, hidden] of the target.
            info: facts about it.
            features: of the streams to come.
            kind: as in `kind`.
            request: which features they are.
            seats: streams that have keys and values at the same time; a span's only block is its seat.
            slots: drafted rows per stream at most.
            device, dtype: of the head.
            trained_for: name of the target that the head was trained for.
        """
        self.info = info
        self.features = features
        self.request = request
        self.trained_for = trained_for
        self.target_ids = head.target_ids.cpu().numpy()
        self._head = head
        self._embeddings = embeddings
        self.kind = kind
        self._device, self._dtype = device, dtype
        self._shape = shape = head.shape
        self._ring = features.window + slots
        self.kv_tokens = seats * self._ring
        boxes = seats * self._ring
        self._keys = torch.zeros((boxes, shape.kv_heads, shape.width), dtype=self._dtype, device=self._device)
        self._values = torch.zeros((boxes, shape.kv_heads, shape.value_width), dtype=self._dtype, device=self._device)
        self._carried = torch.zeros((seats, shape.hidden), dtype=self._dtype, device=self._device)
        self._boxes = torch.arange(self._ring, device=self._device)

    def copy_kv(self, copies: Sequence[Copy]) -> None:
        """
        Raises:
            RuntimeError: always; a head's keys and values hang on the features of its own stream.
        """
        raise RuntimeError(f"a head's KV is never shared, {len(copies)} copies were asked for")

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> Tensor:
        """float32 logits [sum of wanted, draft ids], in span order; a span wants its last row or none."""
        rows = self._lay_out(spans)
        positions, seats = self._ints(rows.positions), self._ints(rows.seats)
        embedded = F.embedding(indices(rows.ids, self._embeddings.device), self._embeddings)
        embedded = embedded.to(self._device, self._dtype)
        hidden = self._hidden(rows, seats)
        if not rows.last:
            self._write(seats, positions, *self._head.key_value(embedded, hidden, positions))
            return torch.empty((0, len(self.target_ids)), device=self._device)
        if len(rows.last) < len(rows.ids):
            is_last = set(rows.last)
            rest = self._ints([row for row in range(len(rows.ids)) if row not in is_last])
            context = embedded[rest], hidden[rest], positions[rest]
            self._write(seats[rest], positions[rest], *self._head.key_value(*context))
            last = self._ints(rows.last)
            embedded, hidden, positions, seats = embedded[last], hidden[last], positions[last], seats[last]
        visible = self._visible(positions, self._ints(rows.lowest))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._write(seats, positions, key, value)
            return self._attend(query, seats, visible)

        output = self._head(embedded, hidden, positions, attend)
        self._carried.index_copy_(0, seats, self._head.carry(output))
        return self._head.logits(output).to(torch.float32)

    def _lay_out(self, spans: Sequence[Span]) -> _Rows:
        rows = _Rows()
        for span in spans:
            known = self.features.get(span.stream_id)
            assert known is not None, "a span is made of a stream with features"
            first, anchor = span.start - 1, span.committed - 2
            end = first + len(span.tokens)
            told = min(end, anchor + 1)
            if first < told:
                rows.features.append(known.rows[first - known.first : told - known.first])
            start = len(rows.ids)
            rows.ids.extend(span.tokens)
            rows.positions.extend(range(first, end))
            rows.seats.extend([span.blocks[0]] * len(span.tokens))
            rows.drafted.extend(range(start + max(told - first, 0), len(rows.ids)))
            if span.wanted:
                rows.last.append(len(rows.ids) - 1)
                rows.lowest.append(max(known.origin, anchor - self.features.window + 1))
        return rows

    def _hidden(self, rows: _Rows, seats: Tensor) -> Tensor:
        """[rows, hidden]: fused features, or the head's output for the row before."""
        if not rows.features:
            return self._carried[seats]
        told = to_device(np.concatenate(rows.features), self._device).view(torch.bfloat16).to(self._dtype)
        fused = self._head.fuse(told)
        if not rows.drafted:
            return fused
        hidden = self._carried[seats]
        is_drafted = set(rows.drafted)
        hidden[self._ints([row for row in range(len(rows.ids)) if row not in is_drafted])] = fused
        return hidden

    def _write(self, seats: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        boxes = seats * self._ring + positions % self._ring
        self._keys.index_copy_(0, boxes, key)
        self._values.index_copy_(0, boxes, value)

    def _visible(self, positions: Tensor, lowest: Tensor) -> Tensor:
        """bool [rows, ring]: which boxes a row attends to. A box holds the last position before the row that is its."""
        in_box = positions[:, None] - (positions[:, None] - self._boxes) % self._ring
        return in_box >= lowest[:, None]

    def _attend(self, query: Tensor, seats: Tensor, visible: Tensor) -> Tensor:
        """[rows, heads, value_width]; the query heads of a KV head are rows of one call."""
        rows, heads, width = query.shape
        kv_heads, value_width = self._shape.kv_heads, self._shape.value_width
        keys = self._keys.view(-1, self._ring, kv_heads, width)[seats].transpose(1, 2)
        values = self._values.view(-1, self._ring, kv_heads, value_width)[seats].transpose(1, 2)
        grouped = query.view(rows, kv_heads, heads // kv_heads, width)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible[:, None, None, :])
        return out.reshape(rows, heads, value_width)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return indices(values, self._device)
