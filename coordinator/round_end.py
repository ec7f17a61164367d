"""How a round ends: where the answer is cut, what is counted, and what becomes committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coordinator.request import Emission
from coordinator.state import Outstanding, Phase, StreamState, extend_hashes
from outrider.features import FeatureBlock
from outrider.logprobs import LogprobRows


class RoundCount(NamedTuple):
    """A round in numbers, after the cut: slots sent, slots that the rule looked at, slots accepted."""

    drafted: int
    tested: int
    accepted: int


class End(NamedTuple):
    """Where emitted tokens end: how many are kept, and why no more (None: the answer goes on)."""

    kept: int
    finish_reason: str | None
    stop_token: int | None


def room(state: StreamState, max_model_len: int) -> int:
    """Tokens that the answer may still get; at least 1 while it has not ended."""
    return min(state.request.params.max_tokens - state.generated, max_model_len - state.committed)


def conclude(
    state: StreamState,
    k: int,
    token: int,
    slots_done: int,
    cached: int,
    max_model_len: int,
    features: FeatureBlock | None = None,
    scores: LogprobRows | None = None,
) -> tuple[Emission, RoundCount]:
    """Ends a round: cut x_1 .. x_k and the token behind them where the answer ends, then count, commit and emit."""
    proposal, start = state.proposal, state.committed
    emitted = [*(proposal.draft_ids[:k].tolist() if proposal is not None else ()), token]
    end = find_end(emitted, state, max_model_len)
    kept, accepted = emitted[: end.kept], min(k, end.kept)

    drafted, tested = (proposal.slots if proposal is not None else 0), min(k + 1, slots_done)
    if end.finish_reason is not None:
        drafted, tested = min(drafted, end.kept), min(tested, end.kept)
    state.stats.count(drafted, tested, accepted)

    commit(state, kept)
    # The prefix that each service shares with the committed tokens ends at the last accepted drafted token.
    state.target.held = min(cached, start + k)
    if proposal is not None:
        if state.draft.opened:  # if not, it was started anew meanwhile
            state.draft.held = max(start, min(proposal.draft_cached, start + k))
        state.proposal = None
    state.features.received(features, state.committed)
    if end.finish_reason is not None:
        state.phase = Phase.CLOSED
        state.target.outstanding = None
    elif state.committed >= state.run_end:
        state.phase, state.target.outstanding = Phase.OPENED, None
    else:
        state.target.outstanding = Outstanding(state.target.generation, state.committed)
    drafted_flags = (True,) * accepted + (False,) * (end.kept - accepted)
    logprobs = scores.emitted(slots_done, len(kept), k) if scores is not None else None
    emission = Emission(tuple(kept), drafted_flags, end.finish_reason, end.stop_token, logprobs)
    return emission, RoundCount(drafted, tested, accepted)


def find_end(emitted: Sequence[int], state: StreamState, max_model_len: int) -> End:
    """The cut: the earliest token that ends the answer; everything behind it is discarded, everywhere.

    At the same token a stop id (end-of-sequence ids are stop ids) goes before a stop string, that before the token
    limit, and that before the context.
    """
    request = state.request
    kept, reason, stop_token = len(emitted), None, None
    if (left := room(state, max_model_len)) <= kept:
        kept, reason = left, "length"
    for index, token in enumerate(emitted[:kept]):
        if token in request.params.stop_token_ids:
            kept, reason, stop_token = index + 1, "stop", token
            break
    if request.cut_text is not None:
        at = request.cut_text(emitted[:kept])
        if at is not None and (stop_token is None or at < kept - 1):
            kept, reason, stop_token = at + 1, "stop", None
    return End(kept, reason, stop_token)


def commit(state: StreamState, tokens: Sequence[int]) -> None:
    """The only place where committed tokens change: they grow."""
    state.tokens.extend(tokens)
    extend_hashes(state.hashes, tokens)
