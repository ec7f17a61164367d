"""Which ids a text holds and how often, kept from step to step: what penalties are functions of.

A row's counts differ from those of the row before by one token, and a step's first from the last step's by what was
accepted. So tokens are counted as they come and uncounted as they are cut, whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_FIRST_ROOM = 64


class Tally:
    """Distinct ids in order of their first occurrence, with their counts. Tokens leave in the reverse order."""

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._ids: Ids = np.empty(_FIRST_ROOM, np.int64)
        self._counts: Ids = np.empty(_FIRST_ROOM, np.int64)

    @property
    def ids(self) -> Ids:
        """int64 [distinct]; a view that the next change may overwrite."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Ids:
        """int64 [distinct], parallel to `ids`; a view likewise."""
        return self._counts[: len(self._place)]

    def add(self, token: int) -> None:
        """Counts a token."""
        place = self._place.get(token)
        if place is not None:
            self._counts[place] += 1
            return
        place = self._place[token] = len(self._place)
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._ids[place], self._counts[place] = token, 1

    def remove(self, token: int) -> None:
        """Uncounts the token that was counted last."""
        place = self._place[token]
        self._counts[place] -= 1
        if not self._counts[place]:
            del self._place[token]  # Its first occurrence is the last one that was new.


class Counts:
    """Counts over one stream's tokens.

    Args:
        prompt_len: tokens before the generated text.

    Attributes:
        known: over prompt and text.
        text: over the generated text only.
    """

    def __init__(self, prompt_len: int) -> None:
        self.known, self.text = Tally(), Tally()
        self._prompt_len = prompt_len
        self._counted: list[int] = []

    def reach(self, tokens: Sequence[int], length: int) -> None:
        """Counts exactly the first `length` tokens; those counted before must not have changed since, see `cut`."""
        self.cut(length)
        for token in tokens[len(self._counted) : length]:
            self.known.add(token)
            if len(self._counted) >= self._prompt_len:
                self.text.add(token)
            self._counted.append(token)

    def cut(self, length: int) -> None:
        """Tokens from `length` on are not the stream's any more."""
        while len(self._counted) > length:
            token = self._counted.pop()
            self.known.remove(token)
            if len(self._counted) >= self._prompt_len:
                self.text.remove(token)
