"""The coordinator's planted errors, and who may ask for any; see `outrider.planted`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.parts import DecoderState
from coordinator.state import Proposal, StreamState
from outrider.distribution import TOTAL
from outrider.errors import InvalidArgument
from outrider.noise import Role, sixteen_bits
from outrider.planted import LOOKED_AT_BELOW, Plant


def check_allowed(plant: Plant, refusing: Sequence[str]) -> None:
    """
    Args:
        plant: what a request asks for.
        refusing: parts that were not started with `--allow-planted-errors`.

    Raises:
        InvalidArgument: a part does not allow it.
    """
    if plant is not Plant.NONE and refusing:
        raise InvalidArgument(
            "speculative.planted_error",
            f"is refused: not started with --allow-planted-errors: {', '.join(refusing)}",
        )


def allowing(state: DecoderState, *, coordinator: bool) -> dict[str, bool]:
    """Which parts were started with `--allow-planted-errors`; a draft that is not attached is left out."""
    parts = {"coordinator": coordinator, "target": state.target is not None and state.target.allow_planted_errors}
    return parts | ({"draft": state.draft.allow_planted_errors} if state.draft is not None else {})


def shared_noise(
    u: NDArray[np.float64], states: Sequence[StreamState], m: NDArray[np.int64], slots: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The accept uniforms, but the draft's own words where a stream asks for SHARED_NOISE; arguments as in `accept`."""
    shared = np.repeat([state.request.planted is Plant.SHARED_NOISE for state in states], m)
    if not shared.any():
        return u
    words = sixteen_bits(
        np.repeat(np.array([state.keys.draft for state in states], np.uint64), m),
        np.repeat(np.array([state.committed for state in states], np.uint32), m),
        slots.astype(np.uint32),
        np.repeat(np.array([state.request.sample_index for state in states], np.uint32), m),
        Role.DRAFT,
    )
    return np.where(shared, words / TOTAL, u)


def drop_after_look(state: StreamState, proposal: Proposal) -> Proposal:
    """The proposal, but cut at the first token with a small q(x) where a stream asks for DROP_AFTER_LOOK."""
    if state.request.planted is not Plant.DROP_AFTER_LOOK or not state.request.rejects:
        return proposal
    dropped = np.flatnonzero(proposal.own_counts.astype(np.int64) + 1 < LOOKED_AT_BELOW * TOTAL)
    if not len(dropped):
        return proposal
    n = int(dropped[0])
    held = int(proposal.support_sizes[:n].sum())
    return proposal._replace(
        draft_ids=proposal.draft_ids[:n],
        own_counts=proposal.own_counts[:n],
        support_sizes=proposal.support_sizes[:n],
        q_ids=proposal.q_ids[:held],
        q_counts=proposal.q_counts[:held],
        dense_q=proposal.dense_q.reshape(proposal.slots, -1)[:n].reshape(-1),
    )
