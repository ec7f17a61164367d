"""A suffix automaton over a stream's own tokens: the longest match there is, whatever its length.

The longest suffix of the text that also occurs earlier is the suffix link of the automaton's last state; what followed
its most recent earlier occurrence is proposed, the more tokens the longer the match is. Taking a token in is amortised
constant.
(Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985; length by match: Oliaro et al.,
"SuffixDecoding", arXiv 2411.04975, section 4.)
"""

from __future__ import annotations

from draft_service.ngram import continuation

_PER_MATCHED = 2
"""Drafted tokens per matched one, at most: a short match is weak evidence for a long continuation."""
_REFRESHED = 64
"""States whose latest occurrence is kept up to date with each token, from the longest suffix down. A text that repeats
one token has as many as it is long; there an older occurrence does as well."""


class SuffixIndex:
    """Finds the longest suffix that occurred before, in the last tokens of one stream.

    Args:
        shortest: of the matches that count.
        window: this many of the last tokens are kept at least; at twice as many the automaton is built anew over them,
            which bounds its memory at 4 window states.
    """

    def __init__(self, shortest: int, window: int) -> None:
        self._shortest = shortest
        self._window = window
        self._dropped = 0
        self._clear()

    @property
    def size(self) -> int:
        """Tokens taken in so far, the forgotten ones included."""
        return self._dropped + len(self.tokens)

    def extend(self, tokens: list[int]) -> None:
        """Takes further tokens in."""
        for token in tokens:
            if len(self.tokens) >= 2 * self._window:
                kept = self.tokens[-self._window :]
                self._dropped += len(self.tokens) - self._window
                self._clear()
                for old in kept:
                    self._append(old)
            self._append(token)

    def propose(self, slots: int) -> list[int]:
        """At most `slots` tokens, and at most twice the match's length; [] where no match is long enough."""
        state = self._link[self._last]
        matched = self._length[state] if state >= 0 else 0
        if matched < self._shortest:
            return []
        return continuation(self.tokens, self._continued_at[state], min(slots, _PER_MATCHED * matched))

    def _clear(self) -> None:
        self.tokens: list[int] = []
        # Of each state: successors by token, suffix link, length of its longest string, and the position of the token
        # behind the latest occurrence of its strings, the one at the end of the text left out.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._continued_at = [0]
        self._last = 0

    def _append(self, token: int) -> None:
        position = len(self.tokens)
        self._refresh(position)
        self.tokens.append(token)
        new = self._add({}, 0, position + 1, position)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state < 0 else self._longest_shared(state, token)
        self._last = new

    def _longest_shared(self, state: int, token: int) -> int:
        """The state whose longest string is that of `state` and `token`; split off its successor if need be."""
        successor = self._next[state][token]
        length = self._length[state] + 1
        if self._length[successor] == length:
            return successor
        clone = self._add(dict(self._next[successor]), self._link[successor], length, self._continued_at[successor])
        self._link[successor] = clone
        at = state
        while at >= 0 and self._next[at].get(token) == successor:
            self._next[at][token] = clone
            at = self._link[at]
        return clone

    def _refresh(self, position: int) -> None:
        """The suffixes of the text so far are about to be continued by the token at `position`."""
        state = self._last
        for _ in range(_REFRESHED):
            if state <= 0:
                break
            self._continued_at[state] = position
            state = self._link[state]

    def _add(self, successors: dict[int, int], link: int, length: int, continued_at: int) -> int:
        self._next.append(successors)
        self._link.append(link)
        self._length.append(length)
        self._continued_at.append(continued_at)
        return len(self._length) - 1
