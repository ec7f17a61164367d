"""Token ids to text, one token at a time, so that text can be shown before the answer is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CONTEXT_TOKENS = 5
"""Prompt tokens that give the first generated token its context: some decoders drop the space of a leading word."""
_ANCHOR_TOKENS = 64
"""Prompt tokens among which ordinary ones are looked for."""
_MAX_PENDING_BYTES = 3
"""A character of UTF-8 lacks at most three bytes, so at most three trailing replacement characters may still change."""
_MAX_WINDOW_TOKENS = 32
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes a growing answer.

    A decoder is not a function of single tokens: a character may be spread over several, and a leading space depends on
    what stands before. So a short window of the latest tokens is decoded again with every token, and what it adds to
    the text already given out is returned. A replacement character at the end is held back until it is certain.

    Some decoders take a run of tokens that stand for single bytes as one piece, and spoil all of it while its end is
    incomplete. So what was given out is followed up behind ordinary tokens, never behind bytes that were complete.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skipped_ids: frozenset[int],
        context: Sequence[int] = (),
        byte_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Starts behind `context`, the prompt's ids; `skipped_ids` contribute no text, `byte_ids` one byte each."""
        self._decode = decode
        self._skipped = skipped_ids
        self._bytes = byte_ids
        self._window: list[int] = []
        self._whole = 0
        self._given = 0
        self._said = ""
        ordinary = [token for token in context[-_ANCHOR_TOKENS:] if token not in skipped_ids and token not in byte_ids]
        self._anchor = ordinary[-_CONTEXT_TOKENS:]
        self._rebase([token for token in context[-_CONTEXT_TOKENS:] if token not in skipped_ids])

    def push(self, token: int) -> str:
        """Text that became certain with this token; often the token's own, sometimes none."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.startswith(self._said) and len(self._window) <= _MAX_WINDOW_TOKENS:
            return ""  # a run of bytes behind bytes, with no ordinary token before them, until it is complete
        pending = _pending(text)
        new = text[self._given : len(text) - pending]
        if new and not pending:
            self._rebase(self._window[self._whole :])
        elif len(self._window) > _MAX_WINDOW_TOKENS:  # endless invalid bytes: cost must not grow with the answer
            self._rebase(self._window[-_MAX_WINDOW_TOKENS // 2 :])
        else:
            self._given = max(self._given, len(text) - pending)
            self._said = text[: self._given]
        return new

    def flush(self) -> str:
        """What is still held back, at the end of the answer: bytes that never became a character."""
        text = self._decode(self._window)
        new = text[self._given :]
        self._given = len(text)
        return new

    def _rebase(self, window: list[int]) -> None:
        """Continues from a shorter window whose certain text has been given out."""
        text = self._decode(window) if window else ""
        if self._bytes and not _pending(text):
            window = [token for token in window if token not in self._bytes] or self._anchor or window
            self._anchor = [token for token in window if token not in self._bytes]
            text = self._decode(window) if window else ""
        self._window = list(window)
        self._whole = len(window)
        self._given = len(text) - _pending(text)
        self._said = text[: self._given]


def _pending(text: str) -> int:
    """Characters at the end of `text` that further bytes may still change."""
    tail = text[-_MAX_PENDING_BYTES:]
    return len(tail) - len(tail.rstrip(_REPLACEMENT))
