"""Sequence: what a service knows of one decoding stream, as a cache of the coordinator's committed tokens.

    tokens     |-------- committed --------|-- ahead --|      ahead: drafted or drawn here, not confirmed yet
    KV valid   |---------- cached --------------|             cached may end on either side of committed
    KV fixed   |---- shared ----|                             whole blocks that other streams may read, never written

The coordinator's committed list is the only truth. `sync` brings a sequence in line with it: truncate to the common
prefix, then append. What was guessed right keeps its KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from itertools import accumulate

from outrider.engine.counts import Counts
from outrider.engine.grammar import Matcher
from outrider.engine.prefix_index import BlockNames
from outrider.engine.span import Span
from outrider.errors import InvalidArgument, StaleCache
from outrider.seam import NO_NOTE, Note, StreamOpen, prefix_hash


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of a service; lives in the engine thread.

    Attributes:
        opened: what the coordinator said when it opened the stream.
        owner: the coordinator's 16 bytes.
        tokens: all known tokens, committed ones first.
        committed: tokens confirmed by the coordinator (prompt included) or drawn here in a plain run.
        cached: positions [0, cached) have valid KV, computed from exactly `tokens[:cached]`.
        names: of its full blocks; None where prefixes are not reused.
        shared: positions [0, shared) lie in blocks that other streams may read.
        dropped: positions behind the first few whose KV was let go of, a multiple of the block size (`Streams.slide`).
        blocks: block table, owned through the `BlockManager`.
        prefix_tokens: tokens of the prompt whose KV was found; None before it was looked for.
        preemptions: times that the KV was lost to another stream.
        generation: that of the last item taken.
        matcher: follows the grammar of its text, or None.
        counts: of its ids, where its parameters penalise any.
        deadline: clock time after which the stream may be dropped.
    """

    opened: StreamOpen
    owner: bytes
    deadline: float
    tokens: list[int] = field(default_factory=list)
    committed: int = 0
    cached: int = 0
    names: BlockNames | None = None
    shared: int = 0
    dropped: int = 0
    blocks: list[int] = field(default_factory=list)
    prefix_tokens: int | None = None
    preemptions: int = 0
    generation: int = 0
    matcher: Matcher | None = None
    counts: Counts | None = None
    _noted: Note = NO_NOTE
    # Hash over tokens[:i + 1] at index i, as far as it was asked for: eight bytes a token make any base a look-up.
    _hashes: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def generated(self) -> int:
        """Committed tokens behind the prompt."""
        return self.committed - self.opened.prompt_length

    @property
    def pending(self) -> int:
        """Known tokens whose KV is missing."""
        return len(self.tokens) - self.cached

    def take_note(self) -> Note:
        """What has been done for the stream since the last call."""
        found, before = self.prefix_tokens or 0, self._noted
        if found == before.prefix_tokens and self.preemptions == before.preemptions:
            return NO_NOTE
        self._noted = Note(found, self.preemptions)
        return Note(found - before.prefix_tokens, self.preemptions - before.preemptions)

    def sync(self, base: int, tokens: Tokens[int], committed: int, base_hash: int) -> None:
        """Makes the first `committed` tokens known: those before `base` by hash, the rest as sent.

        Args:
            base: position of the first token sent.
            tokens: the committed tokens from `base` on.
            committed: committed length, prompt included.
            base_hash: `prefix_hash` over the tokens before `base`.

        Raises:
            InvalidArgument: the columns contradict each other.
            StaleCache: the sequence does not hold that prefix; it is unchanged. `cached_length` says from where to
                send again; three tries at most lead to success, because the last one starts at 0.
        """
        if base + len(tokens) != committed:
            raise InvalidArgument(
                "token_counts", f"{len(tokens)} tokens from position {base} on do not reach {committed} committed ones"
            )
        if committed < max(self.opened.prompt_length, 1):
            raise InvalidArgument(
                "committed_lengths", f"{committed} is less than the prompt's {self.opened.prompt_length} tokens"
            )
        if base > len(self.tokens) or self.hash_at(base) != base_hash:
            # Tokens ahead may be the wrong guess; the confirmed ones are the better place to start again.
            resume = self.committed if base > self.committed else 0
            raise StaleCache(f"stream {self.opened.stream_id:016x} holds another prefix at {base}", resume)
        known = self.tokens[base:committed]
        if known != tokens:
            common = next((i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b), len(known))
            self.rollback(base + common)
            self.tokens.extend(tokens[common:])
        else:
            self.rollback(committed)
        self.committed = committed

    def rollback(self, length: int) -> None:
        """Forgets all tokens from position `length` on.

        Raises:
            ValueError: `length` is negative or beyond the known tokens.
        """
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"cannot cut {len(self.tokens)} tokens to {length}")
        del self.tokens[length:]
        del self._hashes[length:]
        if self.names is not None:
            self.names.cut(length)
        if self.counts is not None:
            self.counts.cut(length)
        self.cached = min(self.cached, length)
        self.committed = min(self.committed, length)

    def span(self, wanted: int, limit: int | None = None) -> Span:
        """The next tokens to feed, up to the last known one.

        Args:
            wanted: logits rows wanted, those of the last `wanted` known tokens. Where the KV of such a token is valid
                already (a repeated item), it is fed again: the same token at the same position gives the same KV.
            limit: tokens to feed at most; a span cut by it wants no logits and must not reach the wanted rows.

        Raises:
            ValueError: more rows are wanted than there are tokens, the limit cuts into the wanted rows, or the span
                would be written where other streams read.
        """
        length = len(self.tokens)
        if not 0 <= wanted <= length:
            raise ValueError(f"{wanted} rows wanted of {length} tokens")
        start = min(self.cached, length - wanted)
        if start < self.shared:
            raise ValueError(f"a span from {start} on would write blocks shared up to {self.shared}")
        stop = length if limit is None else min(length, start + limit)
        if stop < length:
            if stop > length - wanted:
                raise ValueError(f"a limit of {limit} tokens cuts into the {wanted} rows wanted")
            wanted = 0
        return Span(
            stream_id=self.opened.stream_id,
            tokens=self.tokens[start:stop],
            start=start,
            wanted=wanted,
            blocks=self.blocks,
            prompt_len=self.opened.prompt_length,
            committed=self.committed,
            dropped=self.dropped,
        )

    def fed(self, span: Span) -> None:
        """Takes note that a forward wrote the KV of a span."""
        self.cached = span.start + len(span.tokens)

    def hash_at(self, length: int) -> int:
        """`prefix_hash` over the first `length` known tokens; hashes only what was never asked for."""
        hashed = len(self._hashes)
        if hashed < length:
            last = self._hashes[-1] if hashed else 0
            steps = accumulate(self.tokens[hashed:length], _one_more, initial=last)
            next(steps)
            self._hashes.extend(steps)
        return self._hashes[length - 1] if length else 0


def _one_more(value: int, token: int) -> int:
    return prefix_hash([token], value)
