"""The time in which all streams of a cell decode: the only part of a visit that counts.

Before it some streams read their prompt, after it some have ended; either would be counted as a slow batch. Each
stream's rate is taken from one of its own pieces to another, so no round is cut at an edge, and the last piece of an
answer is left out, because `max_tokens` cuts it short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from loadtest.outcome import Outcome, Piece


class Window(NamedTuple):
    """What was seen of a batch of streams.

    Attributes:
        rates: tokens per second of each stream.
        seconds: length of the window.
        rounds: pieces within it, over all streams.
    """

    rates: tuple[float, ...]
    seconds: float
    rounds: int


class TooShort(Exception):
    """The streams never decoded all at once for two rounds: answers are too short for this batch."""


def measure(outcomes: Sequence[Outcome], least_tokens: int = 1) -> Window:
    """The window of streams that were started together.

    Args:
        outcomes: of all of them.
        least_tokens: that every stream has to make within it.

    Raises:
        TooShort: there is none, or a shorter one.
        ValueError: the server does not count tokens with each piece (`continuous_usage_stats`).
    """
    streams = [_whole_rounds(outcome) for outcome in outcomes]
    if not all(streams):
        raise TooShort("an answer came in a single piece")
    begin_s = max(pieces[0].at_s for pieces in streams)
    end_s = min(pieces[-1].at_s for pieces in streams)
    rates, rounds = [], 0
    for pieces in streams:
        inside = [piece for piece in pieces if begin_s <= piece.at_s <= end_s]
        if len(inside) < 2 or inside[-1].at_s <= inside[0].at_s:
            raise TooShort(
                "the first stream ended before the last one had begun: answers are too short, or the server takes "
                "fewer streams at once (max_num_seqs)"
            )
        tokens = _tokens(inside[-1]) - _tokens(inside[0])
        if tokens < least_tokens:
            raise TooShort(f"a stream made {tokens} tokens while all were decoding, of {least_tokens} at least")
        rates.append(tokens / (inside[-1].at_s - inside[0].at_s))
        rounds += len(inside) - 1
    return Window(tuple(rates), end_s - begin_s, rounds)


def _whole_rounds(outcome: Outcome) -> Sequence[Piece]:
    return outcome.pieces[:-1]


def _tokens(piece: Piece) -> int:
    if piece.tokens is None:
        raise ValueError("the server does not count tokens with each piece (stream_options.continuous_usage_stats)")
    return piece.tokens
