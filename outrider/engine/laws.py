"""Laws of text in closed form: what a stub model says comes next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidArgument

Ids = NDArray[np.int64]
F32 = NDArray[np.float32]

BYTES_VOCAB = 258
"""Ids of the `stub:bytes` tokenizer: 256 bytes, BOS, EOS."""
BYTES_EOS = 257

IMPOSSIBLE = -1e9
"""Logit of probability 0: exp of it is 0 at any temperature up to 100, and yet a mask over all else leaves a law."""

_PRINTABLE = range(32, 127)
_NEXT_PROBABILITY = 0.9


class Law(Protocol):
    """What comes after a token.

    Attributes:
        vocab: number of ids.
        eos: id that ends a text, or None.
    """

    vocab: int
    eos: int | None

    def right(self, tokens: Ids, generated: Ids) -> F32:
        """Logits [n, vocab] behind the last token and the number of tokens generated so far, [n] each."""

    def wrong(self, tokens: Ids, generated: Ids) -> Ids:
        """[n] ids of the least probability there: the lowest such id, EOS only if there is no other."""


class ScriptLaw:
    """The i-th generated token is the i-th of `tokens`, then EOS."""

    def __init__(self, tokens: Sequence[int], eos: int, vocab: int) -> None:
        for token in (*tokens, eos):
            if not 0 <= token < vocab:
                raise InvalidArgument("model", f"the script's id {token} is outside its vocabulary of {vocab}")
        self.vocab = vocab
        self.eos: int | None = eos
        self._next = np.array([*tokens, eos])
        self._wrong = np.array([_least(np.arange(vocab) == token, eos) for token in self._next])

    def right(self, tokens: Ids, generated: Ids) -> F32:
        return one_hot(self._next[self._place(generated)], self.vocab)

    def wrong(self, tokens: Ids, generated: Ids) -> Ids:
        return self._wrong[self._place(generated)]

    def _place(self, generated: Ids) -> Ids:
        return np.clip(generated, 0, len(self._next) - 1)


class MarkovLaw:
    """The next token depends on the last one only: row t of a table is the law after t."""

    def __init__(self, table: NDArray[np.float64], eos: int | None) -> None:
        self.vocab = len(table)
        if eos is not None and not 0 <= eos < self.vocab:
            raise InvalidArgument("model", f"eos {eos} is outside the table's vocabulary of {self.vocab}")
        self.eos = eos
        with np.errstate(divide="ignore"):
            self._logits = np.maximum(np.log(table), IMPOSSIBLE).astype(np.float32)
        self._wrong = np.array([_least(row, eos) for row in table])

    def right(self, tokens: Ids, generated: Ids) -> F32:
        return self._logits[tokens]

    def wrong(self, tokens: Ids, generated: Ids) -> Ids:
        return self._wrong[tokens]


def one_hot(ids: Ids, vocab: int) -> F32:
    """Logits [n, vocab] of laws that are certain of [n] ids."""
    logits = np.full((len(ids), vocab), IMPOSSIBLE, np.float32)
    logits[np.arange(len(ids)), ids] = 0.0
    return logits


def printable_table() -> NDArray[np.float64]:
    """The law without a table, [258, 258]: the next printable ASCII id with .9, the rest even over the other ones."""
    first, last = _PRINTABLE[0], _PRINTABLE[-1]
    table = np.zeros((BYTES_VOCAB, BYTES_VOCAB))
    table[:, first : last + 1] = (1 - _NEXT_PROBABILITY) / (len(_PRINTABLE) - 1)
    for token in range(BYTES_VOCAB):
        table[token, max(token + 1, first) if token < last else first] = _NEXT_PROBABILITY
    return table


def read_table(path: Path) -> NDArray[np.float64]:
    """A V x V table of probabilities from a JSON list of rows; rows are normalised to sum to 1 exactly.

    Raises:
        InvalidArgument: naming the file and what is wrong with it.
    """
    try:
        table = np.array(json.loads(path.read_text()), np.float64)
    except OSError as error:
        raise InvalidArgument("model", f"the table {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise InvalidArgument("model", f"the table {path} is not a JSON list of rows of numbers: {error}") from error
    if table.ndim != 2 or table.shape[0] != table.shape[1] or not len(table):
        raise InvalidArgument("model", f"the table {path} has shape {table.shape}; it must be V x V")
    if not (np.isfinite(table).all() and (table >= 0).all() and np.allclose(table.sum(axis=1), 1, atol=1e-6)):
        raise InvalidArgument("model", f"the table {path} holds a row that is no distribution")
    return table / table.sum(axis=1, keepdims=True)


def _least(row: NDArray[np.generic], eos: int | None) -> int:
    least = np.flatnonzero(row == row.min())
    return int(next((token for token in least if token != eos), least[0]))
