"""A draft and a target made of two tables, as functions from batch to batch: the decoding loop's tests need no more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.distribution import TOTAL, draw, quantise
from outrider.noise import Role, coupled_choice, gumbel_row_keys, sixteen_bits, uniforms
from outrider.rule import inverse_cdf, residual
from outrider.sampling import Form, Rule
from outrider.seam import Cut, ProposalBatch, ProposeBatch, Replies, Slots, StreamOpen, VerdictBatch, VerifyBatch

F64 = NDArray[np.float64]


@dataclass
class _Known:
    opened: StreamOpen
    tokens: list[int]


class _Cache:
    """Streams as a service holds them."""

    def __init__(self) -> None:
        self.known: dict[int, _Known] = {}

    def take(self, batch: ProposeBatch | VerifyBatch) -> list[_Known]:
        """Brings every stream of a batch up to date, in item order."""
        for opened in batch.opens:
            self.known[opened.stream_id] = _Known(opened, [])
        items, at, streams = batch.items, 0, []
        for stream_id, base, count in zip(items.stream_ids, items.bases, items.token_counts, strict=True):
            known = self.known[int(stream_id)]
            assert base <= len(known.tokens)
            known.tokens = known.tokens[:base] + items.tokens[at : at + count].tolist()
            at += count
            streams.append(known)
        return streams


def replies(batch: ProposeBatch | VerifyBatch, cached: list[int]) -> Replies:
    """OK for every item of a batch."""
    items = batch.items
    return Replies(
        stream_ids=items.stream_ids,
        generations=items.generations,
        committed_lengths=items.committed_lengths,
        statuses=np.zeros(len(items), np.uint8),
        cached_lengths=np.array(cached, np.uint32),
    )


class TableDraft(_Cache):
    """Proposes from q = table[last token]; one-hot rows for greedy and coupled streams, as the real service does."""

    def __init__(self, table: F64) -> None:
        super().__init__()
        self.table = table

    def propose(self, batch: ProposeBatch) -> ProposalBatch:
        ids, own, sizes, q_ids, q_counts, dense, cached = [], [], [], [], [], [], []
        for known, slots in zip(self.take(batch), batch.slots.tolist(), strict=True):
            start = len(known.tokens)
            for slot in range(slots):
                q = self.table[known.tokens[-1]]
                opened = known.opened
                if opened.rule is Rule.COUPLED or opened.params.greedy:
                    token = _own_choice(q, opened, len(known.tokens))
                    own.append(TOTAL - 1)
                    sizes.append(0)
                else:
                    row = quantise(np.arange(len(q)), q)
                    index = draw(
                        row, int(sixteen_bits(*_counter(opened.draft_key, start, slot, opened), Role.DRAFT)[0])
                    )
                    token = int(row.ids[index])
                    own.append(int(row.counts[index]) - 1)
                    if opened.form is Form.DENSE:
                        sizes.append(0)
                        full = np.zeros(len(q), np.float32)
                        full[row.ids] = row.counts / TOTAL
                        dense.append(full)
                    else:
                        sizes.append(len(row.ids) if len(row.ids) > 1 else 0)
                        if len(row.ids) > 1:
                            q_ids.append(row.ids)
                            q_counts.append(row.counts - 1)
                ids.append(token)
                known.tokens.append(token)
            # What was sampled last was never fed.
            cached.append(len(known.tokens) - (1 if slots else 0))
        return ProposalBatch(
            replies=replies(batch, cached),
            slots=Slots(
                per_item=batch.slots,
                draft_ids=np.array(ids, np.uint32),
                own_counts=np.array(own, np.uint16),
                support_sizes=np.array(sizes, np.uint16),
                q_ids=np.concatenate([np.empty(0, np.uint32), *q_ids]).astype(np.uint32),
                q_counts=np.concatenate([np.empty(0, np.uint16), *q_counts]).astype(np.uint16),
                dense_q=np.concatenate([np.empty(0, np.float32), *dense]).astype(np.float32),
            ),
        )


class TableTarget(_Cache):
    """Verifies with p = table[last token]; a plain run gives its first token only."""

    def __init__(self, table: F64) -> None:
        super().__init__()
        self.table = table

    def verify(self, batch: VerifyBatch) -> VerdictBatch:
        slots, p_out, emit, bonus, dense, cached = batch.slots, [], [], [], [], []
        at = q_at = row_at = 0
        for known, n in zip(self.take(batch), slots.per_item.tolist(), strict=True):
            opened, start, vocab = known.opened, len(known.tokens), self.table.shape[1]
            is_dense = opened.form is Form.DENSE and opened.rule is Rule.STANDARD and not opened.params.greedy
            u = uniforms(*_counter(opened.emit_key, start, 0, opened), Role.EMIT)
            rows = []
            for slot in range(at, at + n):
                p = self.table[known.tokens[-1]]
                x = int(slots.draft_ids[slot])
                rows.append(p)
                if opened.rule is Rule.COUPLED or opened.params.greedy:
                    p_out.append(0.0)
                    emit.append(_own_choice(p, opened, len(known.tokens)))
                else:
                    q, size = np.zeros(vocab), int(slots.support_sizes[slot])
                    if is_dense:
                        q = slots.dense_q.reshape(-1, vocab)[row_at].astype(np.float64)
                        row_at += 1
                    elif size:
                        q[slots.q_ids[q_at : q_at + size]] = (slots.q_counts[q_at : q_at + size] + 1.0) / TOTAL
                        q_at += size
                    else:
                        q[x] = 1.0
                    p_out.append(float(p[x]))
                    emit.append(int(inverse_cdf(residual(p[None], q[None]), u)[0]))
                known.tokens.append(x)
            at += n
            p = self.table[known.tokens[-1]]
            if opened.rule is Rule.COUPLED or opened.params.greedy:
                bonus.append(_own_choice(p, opened, len(known.tokens)))
            else:
                bonus.append(int(inverse_cdf(p[None], u)[0]))
            if is_dense:
                dense.append(np.concatenate([*rows, p]).astype(np.float32))
            cached.append(len(known.tokens))
        return VerdictBatch(
            replies=replies(batch, cached),
            slots_done=slots.per_item,
            cuts=np.full(len(batch.items), Cut.NONE, np.uint8),
            p=np.array(p_out, np.float32),
            emit=np.array(emit, np.uint32),
            bonus=np.array(bonus, np.uint32),
            dense_p=np.concatenate([np.empty(0, np.float32), *dense]).astype(np.float32),
        )


def _own_choice(row: F64, opened: StreamOpen, position: int) -> int:
    """The token of the coupled rule at a position, or the argmax."""
    if opened.params.greedy:
        return int(np.argmax(row))
    key = gumbel_row_keys(
        np.array([opened.gumbel_key], np.uint64),
        np.array([position], np.uint32),
        np.array([opened.sample_index], np.uint32),
    )
    return int(coupled_choice(row[None], key)[0])


def _counter(key: int, start: int, slot: int, opened: StreamOpen) -> tuple[np.ndarray, ...]:  # type: ignore[type-arg]
    return (
        np.array([key], np.uint64),
        np.array([start], np.uint32),
        np.array([slot], np.uint32),
        np.array([opened.sample_index], np.uint32),
    )
