"""The acceptance rule applied to a target's message: which drafted tokens stand, and which token follows them.

Letters are the paper's (Leviathan et al., arXiv 2211.17192): p target, q draft, x drafted tokens, u accept uniforms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.planted import shared_noise
from coordinator.state import StreamState
from coordinator.synthetic import synthetic_counts
from outrider.errors import InvalidArgument, Status
from outrider.noise import Role, uniforms
from outrider.rule import accepted_counts, dense_round, matched_counts
from outrider.seam import VerdictBatch

F64 = NDArray[np.float64]

_MASS_TOLERANCE = 1e-3
"""How far a row of float32 may sum from 1."""


def accept(
    rounds: Mapping[int, StreamState], states: Sequence[StreamState | None], batch: VerdictBatch
) -> dict[int, tuple[int, int]]:
    """The rule, vectorised over all rounds of a message.

    Args:
        rounds: index in the batch -> stream whose proposal it answers.
        states: the stream of every item of the batch, None where it is unknown.

    Returns:
        index -> (k, token): x_1 .. x_k are accepted, and the token behind them is the recovered one of the first
        rejected slot, or the bonus.

    Raises:
        InvalidArgument: dense rows are not those of the streams that want them.
    """
    if not rounds:
        return {}
    indices, answered = list(rounds), list(rounds.values())
    per_item = batch.slots_done.astype(np.int64)
    m = per_item[indices]
    starts = (np.cumsum(per_item) - per_item)[indices]
    within = np.arange(m.sum()) - np.repeat(np.cumsum(m) - m, m)
    slots = np.repeat(starts, m) + within
    emit = batch.emit[slots]

    verified = [
        (state.proposal, n) for state, n in zip(answered, m.tolist(), strict=True) if state.proposal is not None
    ]
    x = np.concatenate([proposal.draft_ids[:n] for proposal, n in verified])
    k = matched_counts(x, emit, m)
    rejects = np.array([state.request.rejects for state in answered])
    if rejects.any():
        u = shared_noise(accept_uniforms(answered, m, within), answered, m, within)
        q = np.concatenate([proposal.own_counts[:n] for proposal, n in verified]).astype(np.int64) + 1
        k = np.where(rejects, accepted_counts(batch.p[slots], q, u, m), k)
    k = synthetic_counts(answered, k, m, within)

    # One entry more than there are slots, so that an item without any may be indexed too; np.where drops its value.
    recovered = np.append(batch.emit, 0)[starts + np.minimum(k, np.maximum(m - 1, 0))]
    tokens = np.where(k < m, recovered, batch.bonus[indices])
    outcomes = dict(zip(indices, zip(k.tolist(), tokens.tolist(), strict=True), strict=True))
    if len(batch.dense_p):
        outcomes |= _accept_dense(rounds, states, batch)
    return outcomes


def accept_uniforms(states: Sequence[StreamState], m: NDArray[np.int64], slots: NDArray[np.int64]) -> F64:
    """u_i of every slot, keyed by the stream's accept key, committed length, slot and sample index.

    Args:
        m: [n] slots of each stream.
        slots: [sum of m] slot within its round, from 0.
    """
    return uniforms(
        np.repeat(np.array([state.keys.accept for state in states], np.uint64), m),
        np.repeat(np.array([state.committed for state in states], np.uint32), m),
        slots.astype(np.uint32),
        np.repeat(np.array([state.request.sample_index for state in states], np.uint32), m),
        Role.ACCEPT,
    )


def _accept_dense(
    rounds: Mapping[int, StreamState], states: Sequence[StreamState | None], batch: VerdictBatch
) -> dict[int, tuple[int, int]]:
    """The textbook form: whole rows of p and q. Item by item; it is the oracle, not the fast path.

    Raises:
        InvalidArgument: the rows are not those of the streams that want them.
    """
    dense = [
        state is not None and state.request.draws_dense and status == Status.OK
        for state, status in zip(states, batch.replies.statuses.tolist(), strict=True)
    ]
    rows = np.where(dense, batch.slots_done.astype(np.int64) + 1, 0)
    starts = np.cumsum(rows) - rows
    width, rest = divmod(len(batch.dense_p), max(int(rows.sum()), 1))
    p_rows = batch.dense_p.reshape(-1, width) if not rest else batch.dense_p[:0]
    # Rows that are taken for other streams' come out too long, and sum to more than 1.
    if rest or not (np.abs(p_rows.sum(axis=1, dtype=np.float64) - 1) < _MASS_TOLERANCE).all():
        raise InvalidArgument("dense_p", f"{len(batch.dense_p)} values are not {rows.sum()} distributions")
    outcomes: dict[int, tuple[int, int]] = {}
    for index, state in rounds.items():
        proposal, m = state.proposal, int(batch.slots_done[index])
        if not dense[index] or proposal is None:
            continue
        p, q = p_rows[starts[index] : starts[index] + m + 1], proposal.dense_q.reshape(proposal.slots, -1)[:m]
        x = proposal.draft_ids[:m].astype(np.int64)
        vocab = max(p.shape[1], q.shape[1])
        u = accept_uniforms([state], np.array([m]), np.arange(m))
        outcomes[index] = dense_round(_widen(p, vocab), _widen(q, vocab), x, u, emit_uniform(state))
    return outcomes


def emit_uniform(state: StreamState) -> float:
    """The uniform that draws the round's last token; the target draws with the same one in the sparse form."""
    start, zero = np.array([state.committed], np.uint32), np.zeros(1, np.uint32)
    sample = np.array([state.request.sample_index], np.uint32)
    return float(uniforms(np.array([state.keys.emit], np.uint64), start, zero, sample, Role.EMIT)[0])


def _widen(rows: NDArray[np.float32], vocab: int) -> F64:
    """Rows of float64 over a vocabulary that is padded on one side: what a side lacks has probability 0 there."""
    return np.pad(rows.astype(np.float64), ((0, 0), (0, vocab - rows.shape[1])))
