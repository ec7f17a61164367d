"""Speculative decoding, one round at a time, as transitions of a stream. No I/O, no clock, no randomness of its own.

    OPENED --propose(gamma)--> DRAFTING --verify(x, q)--> VERIFYING --accept, cut, count, commit--> OPENED
    OPENED --run(credit)--> RUNNING --commit, one token at a time, until the credit is used up--> OPENED

Each transition returns the row to send; `receive_proposals` and `receive_verdicts` take what comes back, for all
streams of a message at once. A reply counts only if it echoes stream, generation and committed length of the one
outstanding item, so duplicates, reordered and late replies fall out. A proposal, once received, is verified as it is:
`resend` sends the same x and q again, to the same target or another one, until there is a verdict.

Letters are the paper's (Leviathan et al., arXiv 2211.17192): p target, q draft, x drafted tokens, u accept uniforms.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from coordinator.acceptance import accept
from coordinator.request import Emission
from coordinator.round_end import RoundCount, conclude
from coordinator.rows import Item, ProposeRow, VerifyRow, split_slots
from coordinator.scores import of_prompt, of_round
from coordinator.state import (
    Outstanding,
    Phase,
    Proposal,
    Side,
    StreamState,
    open_for_draft,
    open_for_target,
)
from outrider.errors import InvalidArgument, Status
from outrider.features import FeatureRequest
from outrider.seam import NO_NOTE, Cut, Note, ProposalBatch, VerdictBatch

logger = logging.getLogger(__name__)


class ProposalAnswer(NamedTuple):
    """What the draft said to the outstanding item of one stream; without slots if it only caught up, or has none."""

    state: StreamState
    status: Status
    message: str
    proposal: Proposal
    note: Note = NO_NOTE


class VerdictAnswer(NamedTuple):
    """What the target said to the outstanding item of one stream.

    Attributes:
        emission: the tokens that were committed, or None where the status is not OK.
        cut: why fewer slots were verified than sent.
        cached_length: what the target holds, for statuses other than OK.
        note: what else it did for the stream.
    """

    state: StreamState
    status: Status
    message: str
    emission: Emission | None
    round: RoundCount
    cut: Cut
    cached_length: int
    note: Note = NO_NOTE


# ---- asking ----


def propose(
    state: StreamState,
    gamma: int,
    *,
    draft_deadline_ms: int,
    stream_deadline_ms: int,
    least_survival: float = 0.0,
) -> ProposeRow:
    """Asks the draft for x_1 .. x_gamma behind the committed tokens, as far as they have this chance of surviving."""
    state.phase, state.asked = Phase.DRAFTING, gamma
    return _propose_row(state, gamma, draft_deadline_ms, stream_deadline_ms, least_survival)


def catch_up(state: StreamState, *, stream_deadline_ms: int) -> ProposeRow:
    """Brings the draft's KV up to date beside whatever else the stream is doing."""
    return _propose_row(state, 0, 0, stream_deadline_ms)


def verify(
    state: StreamState, proposal: Proposal, *, stream_deadline_ms: int, request: FeatureRequest | None = None
) -> VerifyRow:
    """Has the target score a proposal, and send the features that are requested and that the draft will lack."""
    state.features.ask(request)
    state.phase, state.proposal = Phase.VERIFYING, proposal
    return _verify_row(state, stream_deadline_ms)


def run(
    state: StreamState, credit: int, *, stream_deadline_ms: int, request: FeatureRequest | None = None
) -> VerifyRow:
    """Lets the target decode alone: `credit` tokens from the committed length on. Also tops a run up."""
    state.features.ask(request)
    state.phase, state.run_end = Phase.RUNNING, state.committed + credit
    return _verify_row(state, stream_deadline_ms)


def resend(state: StreamState, *, stream_deadline_ms: int) -> VerifyRow:
    """Sends the round in flight again after its item was given up: the same x and q, or what is left of the run."""
    return _verify_row(state, stream_deadline_ms)


def back_to_plain(state: StreamState) -> None:
    """Gives up the proposal that was asked for, before anything of it was seen."""
    state.phase = Phase.OPENED
    state.draft.give_up()


def _item(state: StreamState, side: Side) -> Item:
    """Everything from what the service holds, but at least the last committed token: that is what it must feed."""
    committed = state.committed
    base = min(side.held, committed - 1)
    side.opened = True
    if side.last == (side.generation, committed):
        side.generation += 1  # a second question at the same place must not be answered by an echo of the first
    side.outstanding = side.last = Outstanding(side.generation, committed)
    return Item(state.stream_id, side.generation, committed, base, state.hashes[base], state.tokens[base:])


def _propose_row(
    state: StreamState, gamma: int, draft_deadline_ms: int, stream_deadline_ms: int, least_survival: float = 0.0
) -> ProposeRow:
    opening = None if state.draft.opened else open_for_draft(state, stream_deadline_ms)
    return ProposeRow(
        _item(state, state.draft), gamma, draft_deadline_ms, opening, least_survival, state.features.take()
    )


def _verify_row(state: StreamState, stream_deadline_ms: int) -> VerifyRow:
    opening = None if state.target.opened else open_for_target(state, stream_deadline_ms)
    credit = state.run_end - state.committed if state.phase is Phase.RUNNING else 0
    return VerifyRow(_item(state, state.target), state.proposal, credit, opening, state.features.wish)


# ---- receiving ----


def receive_proposals(streams: Mapping[int, StreamState], batch: ProposalBatch) -> list[ProposalAnswer]:
    """The answers of a draft's message that are still wanted.

    Args:
        streams: by id.
    """
    replies = batch.replies
    states = [streams.get(stream_id) for stream_id in replies.stream_ids.tolist()]
    cached = replies.cached_lengths.tolist()
    statuses = replies.statuses.tolist()
    dense = [state is not None and state.request.draws_dense for state in states]
    proposals = split_slots(batch.slots, cached, dense)
    answers = []
    echoes = zip(replies.generations.tolist(), replies.committed_lengths.tolist(), strict=True)
    for index, (state, (generation, committed)) in enumerate(zip(states, echoes, strict=True)):
        if state is None or not state.draft.answers(generation, committed):
            continue
        state.draft.outstanding = None
        status = Status(statuses[index])
        if status is Status.OK:
            # It has taken all of them in, whether it keeps KV or, like prompt lookup, only the tokens.
            state.draft.held = committed
            state.features.answered(cached[index])
        note = replies.notes.get(index, NO_NOTE)
        answers.append(ProposalAnswer(state, status, replies.errors.get(index, ""), proposals[index], note))
    return answers


def receive_verdicts(
    streams: Mapping[int, StreamState], batch: VerdictBatch, max_model_len: int
) -> list[VerdictAnswer]:
    """Applies a target's message: accept, cut, count and commit, for every stream in it that still waits for it.

    Raises:
        InvalidArgument: the target verified more slots than it was sent.
    """
    replies = batch.replies
    ids, generations = replies.stream_ids.tolist(), replies.generations.tolist()
    committed, statuses = replies.committed_lengths.tolist(), replies.statuses.tolist()
    slots_done, bonus, cached = batch.slots_done.tolist(), batch.bonus.tolist(), replies.cached_lengths.tolist()

    rounds: dict[int, StreamState] = {}
    for index, stream_id in enumerate(ids):
        state = streams.get(stream_id)
        if state is None or state.proposal is None or statuses[index] != Status.OK:
            continue
        if state.target.answers(generations[index], committed[index]):
            if slots_done[index] > state.proposal.slots:
                raise InvalidArgument("slots_done", f"{slots_done[index]} of {state.proposal.slots} slots verified")
            rounds[index] = state
    states = [streams.get(stream_id) for stream_id in ids]
    outcomes = accept(rounds, states, batch)
    features = dict(batch.features.blocks())
    logprobs, prompt_logprobs = batch.logprobs.by_answer(), batch.prompt_logprobs.by_answer()

    answers = []
    for index, stream_id in enumerate(ids):
        state = streams.get(stream_id)
        # A run answers several times, once per token; each answer must continue where the last one ended.
        if state is None or not state.target.answers(generations[index], committed[index]):
            continue
        status, message = Status(statuses[index]), replies.errors.get(index, "")
        if status is not Status.OK:
            state.target.outstanding = None
            answers.append(_failed(state, status, message, cached[index]))
            continue
        note = replies.notes.get(index, NO_NOTE)
        if not state.generated:
            state.stats.cached_tokens = note.prefix_tokens
        k, token = outcomes.get(index, (0, bonus[index]))
        echo = (stream_id, committed[index])
        try:
            scores = of_round(state, slots_done[index], logprobs.get(echo))
            prompt_scores = of_prompt(state, prompt_logprobs.get(echo))
        except InvalidArgument as error:
            # Other answers of the message may have been committed: what is wrong with one ends its stream only.
            state.target.outstanding = None
            answers.append(_failed(state, Status.INTERNAL, str(error), cached[index]))
            continue
        try:
            emission, tally = conclude(
                state, k, token, slots_done[index], cached[index], max_model_len, features.get(stream_id), scores
            )
        except Exception as error:
            # The search for stop strings is the caller's code; if it fails, it ends its own stream and no other.
            logger.exception("stream %016x: its stop strings could not be looked for", stream_id)
            state.target.outstanding = None
            answers.append(_failed(state, Status.INTERNAL, f"{type(error).__name__}: {error}", cached[index]))
            continue
        if prompt_scores is not None:
            emission = emission._replace(prompt_logprobs=prompt_scores)
        answers.append(
            VerdictAnswer(state, status, message, emission, tally, Cut(int(batch.cuts[index])), cached[index], note)
        )
    return answers


def _failed(state: StreamState, status: Status, message: str, cached: int) -> VerdictAnswer:
    return VerdictAnswer(state, status, message, None, RoundCount(0, 0, 0), Cut.NONE, cached)
