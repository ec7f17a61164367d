"""Prompt lookup: the text itself as draft.

The last n tokens are looked up earlier in prompt and text; what followed there is proposed. Longest n first, most
recent match first.
(Saxena, "Prompt Lookup Decoding", 2023; the flags are vLLM's.)
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class NgramIndex:
    """Where each n-gram of a token list was last continued; grows with the list, each lookup takes constant time.

    Attributes:
        shortest, longest: n, inclusive.
        tokens: everything indexed so far.
    """

    shortest: int
    longest: int
    tokens: list[int] = field(default_factory=list)
    # n-gram -> position of the token behind its latest occurrence. An n-gram enters when that token is known, so the
    # end of the list never finds itself.
    _continued_at: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Tokens indexed so far."""
        return len(self.tokens)

    def extend(self, tokens: list[int]) -> None:
        """Indexes further tokens."""
        known, grams = self.tokens, self._continued_at
        for token in tokens:
            end = len(known)
            for n in range(self.shortest, min(self.longest, end) + 1):
                grams[tuple(known[end - n :])] = end
            known.append(token)

    def propose(self, slots: int) -> list[int]:
        """`slots` tokens that followed the longest known suffix; [] where there is none."""
        known = self.tokens
        for n in range(min(self.longest, len(known)), self.shortest - 1, -1):
            start = self._continued_at.get(tuple(known[-n:]))
            if start is not None:
                return continuation(known, start, slots)
        return []


def continuation(tokens: list[int], start: int, slots: int) -> list[int]:
    """`slots` tokens from position `start` < len(tokens) on.

    A continuation that reaches the end of the list goes on into itself, so that a text that repeats with a period
    shorter than `slots` is continued for all of them.
    """
    drafted = tokens[start : start + slots]
    while len(drafted) < slots:
        drafted.append(drafted[start + len(drafted) - len(tokens)])
    return drafted
