"""Stub models: laws known in closed form and a clock, in place of weights.

A stub supplies logits rows and takes its time; scheduler, KV accounting, sampler, verifier and proposer are the real
ones. So every behaviour of the system can be tested through its real services, with expected results on paper. Names
look like `stub:KIND?key=value&key=value`; the matching tokenizer is `stub:bytes` (256 bytes, BOS 256, EOS 257).

Targets:

`stub:script?tokens=5,6,7&eos=2`
    The i-th generated token is the i-th of `tokens`, whatever was accepted before; then `eos` (default: the last id)
    for ever. `vocab` (default 258) sets the vocabulary.
`stub:markov?table=FILE.json`
    The next token's law is the row of the last token in a V x V table of probabilities (a JSON list of rows); `eos`
    names the id that ends a text, if any. Without a table: over 258 ids, the next printable ASCII id after t with
    probability .9 (a space after the last one), the rest even over the other printable ids, EOS (257) never.

Both take a clock: `fixed_ms`, `free_tokens`, `token_ms`, `prefill_token_ms` (default 0 each). A step takes
fixed_ms + token_ms x max(0, decode and verify rows - free_tokens) + prefill_token_ms x prompt tokens. Rows beyond the
prompt whose logits are not wanted, as after a lost cache, count as prompt tokens.

Drafts, which take the target's `tokens`, `eos`, `vocab` or `table` to know what it would choose:

`stub:perfect`
    The target's own law: every slot is accepted.
`stub:wrong`
    At every slot a token that the target gives probability 0 (or the least; the lowest such id, EOS only if need be).
`stub:accept?k=3`, `stub:accept?p=0.8`
    Right for the first k slots of each round and wrong from there on; or right with chance p at each slot, by coins
    that depend on stream id and position alone (Philox), so that a retry finds the same. Meant for temperature 0.
`stub:table?file=FILE.json`
    A law Q of its own, in the format of `table`.
`stub:bad?kind=KIND`
    A perfect draft whose proposals are spoilt by the draft service: `nan`, `inf`, `negative`, `oov`, `empty`, `short`,
    `late` (by `ms`, default 1000), `stale`, `dup`, `die`; from the `after`-th proposal on (default 0).

All drafts take `token_ms`: the time of one drafted slot, whatever the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from outrider.engine.laws import BYTES_EOS, BYTES_VOCAB, Law, MarkovLaw, ScriptLaw, printable_table, read_table
from outrider.errors import InvalidArgument

PREFIX = "stub:"
TARGETS = ("script", "markov")
DRAFTS = ("perfect", "wrong", "accept", "table", "bad")
FAULTS = ("nan", "inf", "negative", "oov", "empty", "short", "late", "stale", "dup", "die")

_CLOCK_KEYS = ("fixed_ms", "free_tokens", "token_ms", "prefill_token_ms")
_LAW_KEYS = ("tokens", "eos", "vocab", "table")
_KEYS = {
    "script": ("tokens", "eos", "vocab", *_CLOCK_KEYS),
    "markov": ("table", "eos", *_CLOCK_KEYS),
    "perfect": (*_LAW_KEYS, "token_ms"),
    "wrong": (*_LAW_KEYS, "token_ms"),
    "accept": (*_LAW_KEYS, "k", "p", "token_ms"),
    "table": ("file", "token_ms"),
    "bad": (*_LAW_KEYS, "kind", "after", "ms", "token_ms"),
}

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Clock:
    """How long a stub's step takes; see the module's description of the keys."""

    fixed_ms: float = 0.0
    free_tokens: int = 0
    token_ms: float = 0.0
    prefill_token_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StubSpec:
    """A parsed stub name.

    Attributes:
        name: the whole name.
        kind: one of `TARGETS` or `DRAFTS`.
        tokens: script, or None for a Markov law.
        eos: id that ends a text; None for the law's default.
        vocab: vocabulary of a script.
        table: file of the Markov law; None for the printable one.
        clock: what a step costs.
        k: slots that `accept` gets right in each round.
        p: chance with which `accept` gets a slot right.
        fault: one of `FAULTS`, for `bad`.
        after: proposals before the fault begins.
        late_ms: delay of the fault `late`.
    """

    name: str
    kind: str
    tokens: tuple[int, ...] | None = None
    eos: int | None = None
    vocab: int = BYTES_VOCAB
    table: Path | None = None
    clock: Clock = Clock()
    k: int | None = None
    p: float | None = None
    fault: str | None = None
    after: int = 0
    late_ms: float = 1000.0

    @property
    def is_draft(self) -> bool:
        return self.kind in DRAFTS

    def law(self) -> Law:
        """The law that the stub draws on; reads its table.

        Raises:
            InvalidArgument: the table or an id is unusable.
        """
        if self.tokens is not None:
            return ScriptLaw(self.tokens, self.vocab - 1 if self.eos is None else self.eos, self.vocab)
        if self.table is not None:
            return MarkovLaw(read_table(self.table), self.eos)
        return MarkovLaw(printable_table(), BYTES_EOS if self.eos is None else self.eos)


def is_stub(name: str) -> bool:
    """Whether a model name means a stub."""
    return name.startswith(PREFIX)


def parse(name: str) -> StubSpec:
    """Reads a stub's name.

    Raises:
        InvalidArgument: unknown kind or key, a value that cannot be read, or keys that contradict each other.
    """
    kind, _, query = name.removeprefix(PREFIX).partition("?")
    if not is_stub(name) or kind not in _KEYS:
        kinds = ", ".join(PREFIX + known for known in _KEYS)
        raise InvalidArgument("model", f"{name!r} is no stub; there are {kinds}")
    keys = _Keys(PREFIX + kind, query, _KEYS[kind])
    spec = StubSpec(
        name=name,
        kind=kind,
        tokens=keys.take("tokens", _ids, None),
        eos=keys.take("eos", _count, None),
        vocab=keys.take("vocab", _positive, BYTES_VOCAB),
        table=keys.take("file" if kind == "table" else "table", Path, None),
        clock=Clock(
            fixed_ms=keys.take("fixed_ms", _duration, 0.0),
            free_tokens=keys.take("free_tokens", _count, 0),
            token_ms=keys.take("token_ms", _duration, 0.0),
            prefill_token_ms=keys.take("prefill_token_ms", _duration, 0.0),
        ),
        k=keys.take("k", _count, None),
        p=keys.take("p", _chance, None),
        fault=keys.take("kind", _fault, None),
        after=keys.take("after", _count, 0),
        late_ms=keys.take("ms", _duration, 1000.0),
    )
    if kind == "script" and spec.tokens is None:
        raise InvalidArgument("model", "stub:script needs tokens=, the ids it says")
    if kind == "table" and spec.table is None:
        raise InvalidArgument("model", "stub:table needs file=, its table of probabilities")
    if kind == "bad" and spec.fault is None:
        raise InvalidArgument("model", f"stub:bad needs kind=, one of {', '.join(FAULTS)}")
    if kind == "accept" and (spec.k is None) == (spec.p is None):
        raise InvalidArgument("model", "stub:accept needs either k= or p=")
    if spec.tokens is not None and spec.table is not None:
        raise InvalidArgument("model", f"{name} names a script and a table; it can follow only one")
    return spec


class _Keys:
    """The `key=value` pairs of a name, each readable once."""

    def __init__(self, stub: str, query: str, allowed: tuple[str, ...]) -> None:
        self._stub = stub
        self._values: dict[str, str] = {}
        for pair in filter(None, query.split("&")):
            key, separator, value = pair.partition("=")
            if key not in allowed:
                raise InvalidArgument("model", f"{stub} has no key {key!r}; it takes {', '.join(allowed)}")
            if not separator or not value or key in self._values:
                raise InvalidArgument("model", f"{stub}: {key} needs one value")
            self._values[key] = unquote(value)

    def take(self, key: str, read: Callable[[str], V], default: V) -> V:
        text = self._values.get(key)
        if text is None:
            return default
        try:
            return read(text)
        except ValueError as error:
            raise InvalidArgument("model", f"{self._stub}: {key}={text} {error}") from None


def _ids(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("is not a whole number from 0 on")
    return int(text)


def _positive(text: str) -> int:
    if (value := _count(text)) == 0:
        raise ValueError("must be positive")
    return value


def _duration(text: str) -> float:
    return _number(text, math.inf)


def _chance(text: str) -> float:
    return _number(text, 1.0)


def _number(text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("is not a number") from None
    if not 0 <= value <= most or math.isinf(value):
        raise ValueError(f"must be a number from 0 to {most:g}")
    return value


def _fault(text: str) -> str:
    if text not in FAULTS:
        raise ValueError(f"is not one of {', '.join(FAULTS)}")
    return text
