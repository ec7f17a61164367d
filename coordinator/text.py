"""The text of one answer: what may be shown after each token, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from coordinator.detokenizer import Detokenizer


class TextPiece(NamedTuple):
    """Text of some tokens.

    Attributes:
        text: became certain with these tokens.
        ends: parallel to the tokens; characters of `text` that are certain after each.
        starts: parallel to the tokens; where in the whole answer the text of each begins, whenever it became certain.
    """

    text: str
    ends: tuple[int, ...]
    starts: tuple[int, ...]


class AnswerText:
    """Detokenises an answer and looks for stop strings, whichever way they lie across tokens.

    The earliest complete match wins (of several completed by one character, the longest), so where an answer ends does
    not depend on how its text is cut into tokens. Text that may be the beginning of a stop string is held back.

    Attributes:
        stopped_by: the stop string that ended the answer, or None.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop: Sequence[str] = (),
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        include_stop: bool = False,
        last_words: Sequence[str] = (),
        may_end: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """A stop string counts only where it lies behind the first `min_tokens` tokens; `stop_ids` have no text.

        `last_words` stop the answer too, and are part of it, where `may_end` says so of the text before them.
        """
        self.stopped_by: str | None = None
        self._detokenizer = detokenizer
        self._stop = tuple(dict.fromkeys((*stop, *last_words)))
        self._last_words = frozenset(set(last_words) - set(stop))
        self._may_end = may_end
        self._shown = frozenset(self._stop) if include_stop else self._last_words
        self._given = ""
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._held = ""
        self._pushed = 0
        self._taken = 0
        self._ready: list[str] = []
        self._decoded = 0
        self._starts: list[int] = []

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was asked for and ended the answer, or None."""
        return None if self.stopped_by in self._last_words else self.stopped_by

    def cut(self, tokens: Sequence[int]) -> int | None:
        """Takes further tokens; the index of the one that completes a stop string, or None. The rest is discarded."""
        for index, token in enumerate(tokens):
            self._push(token)
            if self.stopped_by is not None:
                return index
        return None

    def take(self, tokens: Sequence[int], *, last: bool) -> TextPiece:
        """The text of the next `tokens`, which `cut` may have seen already; with the last ones also what was held."""
        if self.stopped_by is None:
            for token in tokens[self._pushed - self._taken :]:
                self._push(token)
        parts, self._ready = self._ready[: len(tokens)], self._ready[len(tokens) :]
        starts, self._starts = self._starts[: len(tokens)], self._starts[len(tokens) :]
        self._taken += len(tokens)
        if last and self.stopped_by is None:
            remainder = self._held + self._detokenizer.flush()
            self._held = ""
            if remainder:
                parts = [*parts[:-1], parts[-1] + remainder] if parts else [remainder]
        ends, length = [], 0
        for part in parts:
            length += len(part)
            ends.append(length)
        return TextPiece("".join(parts), tuple(ends[: len(tokens)]), tuple(starts))

    def _push(self, token: int) -> None:
        self._pushed += 1
        self._starts.append(self._decoded)
        if token not in self._stop_ids:
            new = self._detokenizer.push(token)
            self._decoded += len(new)
            self._held += new
        certain = len(self._held)
        if self._stop and self._pushed > self._min_tokens:
            found = self._first_stop()
            if found is not None:
                start, end, self.stopped_by = found
                self._held = self._held[:end]
                certain = end if self.stopped_by in self._shown else start
            else:
                certain -= self._partial_stop()
        self._ready.append(self._held[:certain])
        if self._last_words:
            self._given += self._held[:certain]
        self._held = self._held[certain:]

    def _first_stop(self) -> tuple[int, int, str] | None:
        """(start, end, string) of the match that is complete first."""
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := self._find(stop)) >= 0]
        if not found:
            return None
        end, start, stop = min(found)
        return start, end, stop

    def _find(self, stop: str) -> int:
        """Where a stop string begins in the text that is held, or -1."""
        start = self._held.find(stop)
        while start >= 0 and stop in self._last_words and not self._may_end(self._given + self._held[:start]):
            start = self._held.find(stop, start + 1)
        return start

    def _partial_stop(self) -> int:
        """Characters at the end that may begin a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
