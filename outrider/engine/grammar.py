"""Which ids a grammar allows at a position: the first edit of p, and the draft's mirror of it.

A row's mask is a function of the stream's generated tokens before it, and of nothing else: a matcher that has followed
other tokens, as after a rejection, is rolled back to what the two have in common first. So p is what plain decoding
samples from, at every slot.

Two kinds of rows are not constrained, because no text ever comes from them: those behind a token that the grammar
forbids (p of that token is 0, so it is rejected and the rows behind it are never looked at), and those behind an
end-of-sequence id (the answer ended there). An end-of-sequence id is allowed exactly where the text matches as a whole.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from outrider.errors import InvalidArgument
from outrider.grammar import Grammar
from outrider.guidance import source

logger = logging.getLogger(__name__)

_COMPILED = 64
_BYTES = 256

Mask = NDArray[np.bool_]


class Matcher:
    """Follows one stream's text.

    Args:
        start: at the beginning of the text; copied.
        ends: end-of-sequence ids.
    """

    def __init__(self, start: LLMatcher, ends: Collection[int]) -> None:
        self._start = start
        self._at = start.deep_copy()
        self._ends = frozenset(ends)
        self._followed: list[int] = []

    def mask(self, generated: Sequence[int], vocab: int) -> Mask | None:
        """The ids allowed behind these tokens, bool [vocab]; None where they are not constrained.

        None at all are allowed where the grammar got beyond the library's limits.

        Args:
            generated: the stream's tokens behind its prompt.
            vocab: width of a row.
        """
        wanted = list(generated)
        if not self._ends.isdisjoint(wanted) or not self._follow(wanted):
            return None
        allowed = np.zeros(vocab, np.bool_)
        packed = np.frombuffer(self._at.compute_bitmask(), np.uint8)
        if not self._at.is_error():
            bits = np.unpackbits(packed, bitorder="little")[:vocab]
            allowed[: len(bits)] = bits
        return allowed

    def _follow(self, wanted: list[int]) -> bool:
        """Brings the matcher behind these tokens, or as far as the grammar allows them; whether that is all the way."""
        self._rewind(_common(self._followed, wanted))
        ahead = wanted[len(self._followed) :]
        legal = self._at.validate_tokens(ahead) if ahead else 0
        if legal:
            self._at.consume_tokens(ahead[:legal])
            self._followed += ahead[:legal]
        return legal == len(ahead)

    def _rewind(self, length: int) -> None:
        surplus = len(self._followed) - length
        if self._at.is_error() or (surplus and not self._at.rollback(surplus)):
            self._at = self._start.deep_copy()
            self._at.consume_tokens(self._followed[:length])
        del self._followed[length:]


def _common(left: list[int], right: list[int]) -> int:
    if left == right[: len(left)]:
        return len(left)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


class Grammars:
    """The grammars of one service, compiled once each for its tokenizer; the last ones used are kept.

    Args:
        folder: of the model, with its tokenizer.json; None for the byte tokenizer of stubs.
        vocab: rows of the model's output.
        ends: its end-of-sequence ids.
    """

    def __init__(self, folder: Path | None, vocab: int, ends: Sequence[int]) -> None:
        self._folder = folder
        self._vocab = vocab
        self._ends = tuple(ends)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def load(self) -> None:
        """Reads the tokenizer, so that no stream has to wait for it; what is wrong with it is for requests to hear."""
        try:
            self._load()
        except InvalidArgument as error:
            logger.info("structured output is refused here: %s", error)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of a text.

        Raises:
            InvalidArgument: the grammar cannot be followed, or not with this model.
        """
        start = self._compiled.get(grammar)
        if start is None:
            start = LLMatcher(self._load(), source(grammar), log_level=0)
            if start.is_error():
                raise InvalidArgument("grammar", start.get_error())
            self._compiled[grammar] = start
            if len(self._compiled) > _COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Matcher(start, self._ends)

    def mirror(self, grammar: Grammar) -> Matcher | None:
        """The same for a draft, which may propose anything where it cannot follow: that costs acceptance alone."""
        try:
            return self.matcher(grammar)
        except InvalidArgument as error:
            logger.warning("drafting without regard to a grammar: %s", error)
            return None

    def _load(self) -> LLTokenizer:
        if self._tokenizer is None:
            if not self._ends:
                raise InvalidArgument("grammar", "needs an end-of-sequence id, and this model names none")
            self._tokenizer = _bytes(self._vocab, self._ends) if self._folder is None else self._from_folder()
        return self._tokenizer

    def _from_folder(self) -> LLTokenizer:
        assert self._folder is not None
        path = self._folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidArgument("grammar", "needs the model's tokenizer.json, which this model's folder lacks")
        try:
            return LLTokenizer(str(path), n_vocab=self._vocab, eos_token=list(self._ends))
        except ValueError as error:
            logger.warning("no grammars with %s: %s", path, error)
            raise InvalidArgument("grammar", f"cannot be used with this model's tokenizer: {error}") from None


class _ByteTokenizer:
    """What llguidance asks of a tokenizer: ids below 256 are bytes, the others special."""

    bos_token_id = None

    def __init__(self, vocab: int, ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        self.tokens = [bytes([token]) if token < _BYTES else b"<%d>" % token for token in range(vocab)]
        self.special_token_ids = sorted({*range(_BYTES, vocab), *ends})

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _bytes(vocab: int, ends: Sequence[int]) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_ByteTokenizer(vocab, ends)), n_vocab=vocab, eos_token=list(ends))
