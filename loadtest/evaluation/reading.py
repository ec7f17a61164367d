"""What one streamed answer says: how many drafted tokens each round got accepted, and how fast it decoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Arrival(NamedTuple):
    """A token of an answer: when it came, in seconds, and whether the draft had proposed it."""

    at_s: float
    drafted: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer.

    Attributes:
        accepted: by round, those left out that had no room for the deepest gamma before the answer's limit.
        tokens: that came behind the first arrival, up to the end of those rounds.
        seconds: that they took.
        steps: rounds in those seconds.
        drafts: rounds that drafted anything, of `rounds` in the whole answer.
        tested, accepted_tokens: drafted tokens that the rule looked at, and accepted, in the whole answer.
    """

    task: str
    gamma: int
    accepted: tuple[int, ...]
    tokens: int
    seconds: float
    steps: int = 0
    drafts: int = 0
    rounds: int = 0
    tested: int = 0
    accepted_tokens: int = 0


def rounds(arrivals: Sequence[Arrival]) -> list[int]:
    """Accepted tokens by round. A round ends with a token of the target's own; one that the limit cut is no round."""
    found, run = [], 0
    for arrival in arrivals:
        if arrival.drafted:
            run += 1
        else:
            found.append(run)
            run = 0
    return found


def read(task: str, gamma: int, arrivals: Sequence[Arrival], *, limit: int, depth: int) -> Reading:
    """
    Args:
        gamma: drafted tokens per round that were asked for; 0 is plain decoding.
        arrivals: in order.
        limit: tokens that the answer could have at most.
        depth: the deepest gamma of the evaluation. The last `depth + 1` tokens are left out of every answer alike,
            because rounds there draft less than they are asked for.
    """
    whole = rounds(arrivals)
    kept, end = [], 0
    for accepted in whole:
        if limit - end <= depth:
            break
        kept.append(accepted)
        end += accepted + 1
    first_s = arrivals[0].at_s if arrivals else 0.0
    # Tokens that came together with the first one were not decoded in the time behind it.
    behind = [arrival for arrival in arrivals[:end] if arrival.at_s > first_s]
    return Reading(
        task=task,
        gamma=gamma,
        accepted=tuple(kept),
        tokens=len(behind),
        seconds=behind[-1].at_s - first_s if behind else 0.0,
        steps=sum(not arrival.drafted for arrival in behind),
        rounds=len(whole),
    )


def round_s(readings: Iterable[Reading]) -> dict[int, float]:
    """Seconds of a round by gamma, the ways to draft and target included; gammas without a whole round are left out."""
    by_gamma: dict[int, list[Reading]] = {}
    for reading in readings:
        by_gamma.setdefault(reading.gamma, []).append(reading)
    steps = {gamma: sum(one.steps for one in own) for gamma, own in by_gamma.items()}
    return {gamma: sum(one.seconds for one in by_gamma[gamma]) / of for gamma, of in steps.items() if of}


def rate(readings: Iterable[Reading]) -> float:
    """Tokens per second of decoding, over all answers; 0 where nothing was decoded."""
    own = list(readings)
    seconds = sum(reading.seconds for reading in own)
    return sum(reading.tokens for reading in own) / seconds if seconds > 0 else 0.0
