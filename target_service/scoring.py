"""From logits rows to verdicts: what the target says about each drafted slot and about the token behind them.

A round of m slots that starts at committed length n has m + 1 rows; row i is the law of the token at position n + i
given the committed tokens and x_1 .. x_i. Under the standard rule the target ships, for every slot, p_i(x_i) and the
token that a rejection there would emit, drawn from norm((p_i - q_i)+), and for the last row the bonus; one emit word
serves them all, because exactly one of them is ever looked at (outrider/rule.py). Under the coupled rule and at
temperature 0 it ships the tokens y_i that plain decoding would emit. A plain token is a round without slots, so it is
drawn with the very same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.draws import coupled_choice, inverse_cdf, inverted, residual
from outrider.engine.edits import RowContext
from outrider.engine.logits import Processed, greedy, process
from outrider.engine.transfer import indices, read, to_device
from outrider.errors import OutriderError
from outrider.noise import Role, gumbel_row_keys, uniforms
from outrider.sampling import Form, Rule
from outrider.seam import StreamOpen
from target_service.planted import row_shift
from target_service.proposal import Proposal
from target_service.round import NO_F32, NO_U32, Round, Verdict

Faults = Mapping[int, OutriderError]
"""Why rows have no distribution."""

_CHUNK = 1 << 26
"""Logits worked on at once: 256 MB of float32, and as much again for each of p and the residual."""


class _Way(Enum):
    """How a stream's tokens come about."""

    GREEDY = auto()
    COUPLED = auto()
    SPARSE = auto()
    DENSE = auto()


def draws_dense(opened: StreamOpen) -> bool:
    """Whether whole rows of q and p travel: only the standard rule above temperature 0 needs them."""
    return _way(opened) is _Way.DENSE


def judge(logits: Tensor, rounds: Sequence[Round]) -> list[Verdict | OutriderError]:
    """The verdict on each round, or why one of its rows has no distribution.

    Rows are worked on in chunks that bound the workspace; no row depends on the rows beside it.

    Args:
        logits: [sum of the rounds' rows, vocab] float32, in the order of the rounds.
    """
    logits = row_shift(logits, rounds)
    verdicts: list[Verdict | OutriderError] = []
    start = stop = 0
    chunk: list[Round] = []
    for index, a_round in enumerate(rounds):
        chunk.append(a_round)
        stop += a_round.rows
        if index + 1 == len(rounds) or (stop - start) * logits.shape[1] >= _CHUNK:
            verdicts += _judge(logits[start:stop], chunk)
            start, chunk = stop, []
    return verdicts


def accepted_at_most(opened: StreamOpen, proposal: Proposal, verdict: Verdict) -> int:
    """How many of the fed slots can turn out accepted: exactly as many as will where the target answers with its own
    tokens, all of them where the rule is yet to be applied."""
    if _way(opened) in (_Way.SPARSE, _Way.DENSE):
        return len(proposal.x)
    y = verdict.emit.tolist()
    return next((slot for slot, token in enumerate(proposal.x) if token != y[slot]), len(proposal.x))


def _judge(logits: Tensor, rounds: list[Round]) -> list[Verdict | OutriderError]:
    starts = list(accumulate((a_round.rows for a_round in rounds), initial=0))
    by_way: dict[_Way, list[int]] = {}
    for index, a_round in enumerate(rounds):
        by_way.setdefault(_way(a_round.opened), []).append(index)

    verdicts: dict[int, Verdict | OutriderError] = {}
    greedy_ones = by_way.pop(_Way.GREEDY, [])
    if greedy_ones:
        part = [rounds[index] for index in greedy_ones]
        choice = greedy(_take(logits, rounds, starts, greedy_ones), _contexts(part))
        verdicts.update(zip(greedy_ones, _own_tokens(part, choice.ids, choice.faults), strict=True))

    drawing = sorted(index for indices in by_way.values() for index in indices)
    if drawing:
        part = [rounds[index] for index in drawing]
        processed = process(_take(logits, rounds, starts, drawing), _contexts(part))
        verdicts.update(zip(drawing, _draw(processed, part), strict=True))
    return [verdicts[index] for index in range(len(rounds))]


def _way(opened: StreamOpen) -> _Way:
    if opened.params.greedy:
        return _Way.GREEDY
    if opened.rule is Rule.COUPLED:
        return _Way.COUPLED
    return _Way.DENSE if opened.form is Form.DENSE else _Way.SPARSE


def _take(logits: Tensor, rounds: Sequence[Round], starts: list[int], wanted: list[int]) -> Tensor:
    """The rows of the wanted rounds; all of them without a copy."""
    if len(wanted) == len(rounds):
        return logits
    rows = [row for index in wanted for row in range(starts[index], starts[index + 1])]
    return logits[indices(rows, logits.device)]


def _contexts(rounds: Sequence[Round]) -> list[RowContext]:
    return [
        RowContext(
            a_round.opened.params,
            a_round.tokens,
            a_round.committed + slot,
            a_round.opened.prompt_length,
            a_round.matcher,
            a_round.counts,
        )
        for a_round in rounds
        for slot in range(a_round.rows)
    ]


def _draw(processed: Processed, rounds: list[Round]) -> list[Verdict | OutriderError]:
    """Verdicts of rounds above temperature 0 from their processed rows."""
    starts = list(accumulate((a_round.rows for a_round in rounds), initial=0))
    ways = [_way(a_round.opened) for a_round in rounds]
    verdicts: dict[int, Verdict | OutriderError] = {}
    for way, verdict in ((_Way.COUPLED, _coupled), (_Way.SPARSE, _sparse), (_Way.DENSE, _dense)):
        wanted = [index for index, its_way in enumerate(ways) if its_way is way]
        if wanted:
            part = [rounds[index] for index in wanted]
            local = partial(_local_faults, processed.faults, starts, wanted)
            verdicts.update(zip(wanted, verdict(_take(processed.p, rounds, starts, wanted), part, local), strict=True))
    return [verdicts[index] for index in range(len(rounds))]


def _local_faults(faults: Faults, starts: list[int], wanted: list[int]) -> Faults:
    """Faults by row among the rows of the wanted rounds only; waits for the device, see `Processed`."""
    if not faults:
        return {}
    rows = [row for index in wanted for row in range(starts[index], starts[index + 1])]
    return {position: faults[row] for position, row in enumerate(rows) if row in faults}


def _coupled(p: Tensor, rounds: list[Round], faults: Callable[[], Faults]) -> list[Verdict | OutriderError]:
    rows = [a_round.rows for a_round in rounds]
    keys = np.repeat(np.array([a_round.opened.gumbel_key for a_round in rounds], np.uint64), rows)
    samples = np.repeat(np.array([a_round.opened.sample_index for a_round in rounds], np.uint32), rows)
    positions = np.array([a_round.committed + slot for a_round in rounds for slot in range(a_round.rows)], np.uint32)
    y = coupled_choice(p, gumbel_row_keys(keys, positions, samples))
    return _own_tokens(rounds, y, faults())


def _own_tokens(rounds: list[Round], y: NDArray[np.int64], faults: Faults) -> list[Verdict | OutriderError]:
    """Verdicts where the target answers with its own tokens y, one per row."""
    verdicts: list[Verdict | OutriderError] = []
    emitted, tokens = y.astype(np.uint32), y.tolist()
    start = 0
    for a_round in rounds:
        stop, slots = start + a_round.rows, a_round.proposal.slots
        fault = _first(faults, start, stop)
        zeros, emit = (np.zeros(slots, np.float32), emitted[start : start + slots]) if slots else (NO_F32, NO_U32)
        verdicts.append(fault or Verdict(zeros, emit, tokens[stop - 1]))
        start = stop
    return verdicts


def _sparse(p: Tensor, rounds: list[Round], faults: Callable[[], Faults]) -> list[Verdict | OutriderError]:
    starts = list(accumulate((a_round.rows for a_round in rounds), initial=0))
    slots = [a_round.proposal.slots for a_round in rounds]
    u = emit_uniforms(rounds)
    device = p.device

    # Slot i of a round is judged on row i: the row before its token.
    slot_rows = np.array([start + i for start, n in zip(starts, slots, strict=False) for i in range(n)], np.int64)
    last = indices([stop - 1 for stop in starts[1:]], device)
    p_x, emit = NO_F32, np.empty(0, np.int64)
    drawn = inverted(p[last], u)
    if len(slot_rows):
        x = [token for a_round in rounds for token in (*a_round.proposal.x, *([-1] * a_round.proposal.blocked))]
        ids = indices(x, device)
        slot_p = p[to_device(slot_rows, device)]
        of_x = slot_p.gather(1, ids.clamp(min=0)[:, None]).squeeze(1).masked_fill_(ids < 0, 0.0)
        before = list(accumulate(slots, initial=0))
        q_rows = [a_round.proposal.q_slots + first for a_round, first in zip(rounds, before, strict=False)]
        q_ids = np.concatenate([a_round.proposal.q_ids for a_round in rounds])
        q = np.concatenate([a_round.proposal.q for a_round in rounds])
        recovered = inverted(residual(slot_p, np.concatenate(q_rows), q_ids, q), np.repeat(u, slots))
        p_x, emit, bonus = read(of_x, recovered, drawn)
    else:
        (bonus,) = read(drawn)
    found = faults()
    verdicts: list[Verdict | OutriderError] = []
    at = 0
    for index, n in enumerate(slots):
        fault = _first(found, starts[index], starts[index + 1])
        part = slice(at, at + n)
        verdicts.append(fault or Verdict(p_x[part].astype(np.float32), emit[part].astype(np.uint32), int(bonus[index])))
        at += n
    return verdicts


def _dense(p: Tensor, rounds: list[Round], faults: Callable[[], Faults]) -> list[Verdict | OutriderError]:
    """Whole rows; the coordinator computes the rest. `bonus` serves the rounds without slots."""
    starts = list(accumulate((a_round.rows for a_round in rounds), initial=0))
    last = indices([stop - 1 for stop in starts[1:]], p.device)
    bonus = inverse_cdf(p[last], emit_uniforms(rounds))
    found = faults()
    verdicts: list[Verdict | OutriderError] = []
    for index, a_round in enumerate(rounds):
        n = a_round.proposal.slots
        rows = p[starts[index] : starts[index + 1]]
        if a_round.proposal.blocked:  # the row behind a blocked slot does not exist and is never looked at
            rows = torch.cat((rows, rows[-1:]))
        fault = _first(found, starts[index], starts[index + 1])
        verdicts.append(
            fault
            or Verdict(np.zeros(n, np.float32), np.zeros(n, np.uint32), int(bonus[index]), rows.flatten().cpu().numpy())
        )
    return verdicts


def emit_uniforms(rounds: Sequence[Round]) -> NDArray[np.float64]:
    """The one emit word of each round, float64 [rounds]."""
    return uniforms(
        np.array([a_round.opened.emit_key for a_round in rounds], np.uint64),
        np.array([a_round.committed for a_round in rounds], np.uint32),
        np.zeros(len(rounds), np.uint32),
        np.array([a_round.opened.sample_index for a_round in rounds], np.uint32),
        Role.EMIT,
    )


def _first(faults: Faults, start: int, stop: int) -> OutriderError | None:
    """The first fault among rows [start, stop)."""
    return next((faults[row] for row in range(start, stop) if row in faults), None) if faults else None
