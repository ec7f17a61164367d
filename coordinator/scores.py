"""The log-probabilities that a target's answer brings, checked against the round that they are to belong to."""

from __future__ import annotations

from coordinator.state import StreamState
from outrider.errors import InvalidArgument
from outrider.logprobs import LogprobRows


def of_round(state: StreamState, m: int, rows: LogprobRows | None) -> LogprobRows | None:
    """The log-probabilities of a round of m slots, if the stream wants them.

    Raises:
        InvalidArgument: they are missing, or are those of another number of slots.
    """
    if state.request.logprobs is None:
        return None
    if rows is None or len(rows.own) != 2 * m + 1 or len(rows.top) != m + 1:
        raise InvalidArgument("logprobs", f"are not those of a round of {m} slots")
    return rows


def of_prompt(state: StreamState, rows: LogprobRows | None) -> LogprobRows | None:
    """The log-probabilities of the prompt with the first answer, if the stream wants them.

    Raises:
        InvalidArgument: they are missing, or are those of another prompt.
    """
    if state.request.prompt_logprobs is None or state.generated:
        return None
    if rows is None or len(rows.own) != len(state.request.prompt_ids) - 1:
        raise InvalidArgument("prompt_logprobs", "are not those of the prompt")
    return rows
