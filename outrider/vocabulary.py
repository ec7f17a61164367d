"""Whether a draft may propose to a target: their vocabularies, compared by the token string of every id.

Sizes say nothing: families pad their embedding rows differently, and two tokenizers of one size may disagree on every
id. Any q over the target's ids leaves the emitted law untouched, so what a difference costs is acceptance; it is the
draft's ids that mean something else that q must never hold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from outrider.errors import Mismatch, ModelUnavailable
from outrider.fetch.folder import read_json

STUB_BYTES = "stub:bytes"
STUB_BOS_ID = 256
STUB_EOS_ID = 257
_MAX_RANGES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The meaning of every id of one model.

    Attributes:
        tokens: Token string by id; None where the tokenizer leaves a gap.
        added: Ids of added tokens, special ones included.
        rows: Rows of the model's embedding; those beyond `tokens` are padding. At least `len(tokens)`.
    """

    tokens: tuple[str | None, ...]
    added: frozenset[int] = frozenset()
    rows: int = 0

    def __post_init__(self) -> None:
        if self.rows < len(self.tokens):
            object.__setattr__(self, "rows", len(self.tokens))

    @classmethod
    def from_folder(cls, folder: Path) -> Vocabulary:
        """The vocabulary of a model folder, its rows taken from `config.json`.

        Raises:
            ModelUnavailable: when there is no `tokenizer.json`, naming the command that makes one.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelUnavailable(
                f"{folder} has no tokenizer.json; write one with transformers: "
                f"AutoTokenizer.from_pretrained(FOLDER, use_fast=True).save_pretrained(FOLDER)"
            )
        config = read_json(folder / "config.json")
        rows = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0
        return cls.from_bytes(path.read_bytes()).with_rows(rows)

    @classmethod
    def from_bytes(cls, tokenizer_json: bytes) -> Vocabulary:
        """The vocabulary of a `tokenizer.json` file.

        Raises:
            Mismatch: when the content is no tokenizer file.
        """
        try:
            content = json.loads(tokenizer_json)
            base = _base_tokens(content["model"])
            added = {int(token["id"]): str(token["content"]) for token in content.get("added_tokens") or ()}
        except (ValueError, KeyError, TypeError) as error:
            raise Mismatch(f"not a tokenizer.json ({type(error).__name__}: {error})") from error
        by_id = base | added
        return cls(tuple(by_id.get(i) for i in range(max(by_id, default=-1) + 1)), frozenset(added))

    @classmethod
    def stub_bytes(cls) -> Vocabulary:
        """The vocabulary of the tokenizer `stub:bytes`: 256 bytes, BOS, EOS."""
        return cls((*(f"<0x{byte:02X}>" for byte in range(256)), "<s>", "</s>"), frozenset({STUB_BOS_ID, STUB_EOS_ID}))

    def with_rows(self, rows: int) -> Vocabulary:
        """The same vocabulary over an embedding of `rows` rows."""
        return replace(self, rows=max(rows, len(self.tokens)))

    @property
    def hash(self) -> str:
        """SHA-256 in hex over (id, token string) of every id; neither padding nor the layout of the file changes it."""
        digest = hashlib.sha256()
        for token_id, token in enumerate(self.tokens):
            if token is not None:
                encoded = token.encode("utf-8", "surrogatepass")
                digest.update(token_id.to_bytes(4, "little") + len(encoded).to_bytes(4, "little") + encoded)
        return digest.hexdigest()

    def token(self, token_id: int) -> str | None:
        """The token string of an id; None for padding, gaps and ids beyond."""
        return self.tokens[token_id] if token_id < len(self.tokens) else None


class Kind(Enum):
    """How two vocabularies relate."""

    SAME = "same"
    COMPATIBLE = "compatible"
    DIFFERENT = "different"


class Difference(NamedTuple):
    """One id that does not mean the same; None where a side does not have it."""

    token_id: int
    target: str | None
    draft: str | None

    def __str__(self) -> str:
        return f"id {self.token_id} (target {_shown(self.target)}, draft {_shown(self.draft)})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found.

    Attributes:
        kind: `DIFFERENT` must not start unless the user says so.
        excluded_ids: Ids of the draft's rows that its q must never hold, in rising order.
        first_difference: The lowest id whose meaning differs: of the ordinary tokens when they differ, else of any.
        share_agreeing: Ids that mean the same, as a share of all ids that mean something on either side.
        message: One line for people; "" when the two are the same in every row.
    """

    kind: Kind
    excluded_ids: tuple[int, ...]
    first_difference: Difference | None
    share_agreeing: float
    message: str

    def require(self, *, allow_mismatch: bool = False) -> None:
        """Stop a pair that must not start.

        Raises:
            Mismatch: when the vocabularies are different and the user did not allow it.
        """
        if self.kind is Kind.DIFFERENT and not allow_mismatch:
            raise Mismatch(self.message)


def compare(target: Vocabulary, draft: Vocabulary) -> Comparison:
    """Compare two vocabularies by the token string of every id.

    *same*: every id means the same. *compatible*: only added or special ids differ, or one side lacks some ids, or only
    padding differs. *different*: an ordinary token differs, or nothing agrees.
    """
    known = range(max(len(target.tokens), len(draft.tokens)))
    differing = [i for i in known if target.token(i) != draft.token(i)]
    added = target.added | draft.added
    ordinary = [i for i in differing if i not in added and target.token(i) is not None and draft.token(i) is not None]
    meaningful = sum(1 for i in known if target.token(i) is not None or draft.token(i) is not None)
    share = 1.0 - len(differing) / meaningful if meaningful else 0.0
    first = next((_difference(i, target, draft) for i in ordinary or differing), None)
    apart = set(differing)
    excluded = tuple(i for i in range(draft.rows) if i in apart or draft.token(i) is None)
    if ordinary or share == 0.0:
        kind = Kind.DIFFERENT
        message = _different(first, share, meaningful - len(differing))
    elif differing or target.rows != draft.rows:
        kind = Kind.COMPATIBLE
        message = _compatible(target, draft, differing)
    else:
        kind, message = Kind.SAME, ""
    return Comparison(kind, excluded, first, share, message)


def _base_tokens(model: Mapping[str, Any]) -> dict[int, str]:
    vocab = model["vocab"]
    if isinstance(vocab, Mapping):
        return {int(token_id): token for token, token_id in vocab.items()}
    return {token_id: token for token_id, (token, _score) in enumerate(vocab)}  # Unigram: [token, score] in id order


def _difference(token_id: int, target: Vocabulary, draft: Vocabulary) -> Difference:
    return Difference(token_id, target.token(token_id), draft.token(token_id))


def _different(first: Difference | None, share: float, agreeing: int) -> str:
    where = f", first at {first}" if first else ""
    return (
        f"the vocabularies of target and draft are different: {share:.1%} of the ids agree{where}; take a draft with "
        f"the target's tokenizer, or confine it to the {agreeing} agreeing ids with --allow-vocab-mismatch"
    )


def _compatible(target: Vocabulary, draft: Vocabulary, differing: Sequence[int]) -> str:
    both = [i for i in differing if target.token(i) is not None and draft.token(i) is not None]
    groups = {
        "added or special ids that differ": both,
        "ids that only the target has": [i for i in differing if draft.token(i) is None],
        "ids that only the draft has": [i for i in differing if target.token(i) is None],
    }
    parts = [f"{what}: {_ranges(ids)}" for what, ids in groups.items() if ids]
    if target.rows != draft.rows:
        parts.append(
            f"rows: target {target.rows} for {len(target.tokens)} tokens, draft {draft.rows} for {len(draft.tokens)}"
        )
    return f"the vocabularies are compatible, and the draft never proposes what differs ({'; '.join(parts)})"


def _ranges(ids: Iterable[int]) -> str:
    """Rising ids as `3, 90-99`, cut after a few ranges."""
    spans: list[tuple[int, int]] = []
    for token_id in ids:
        if spans and token_id == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], token_id)
        else:
            spans.append((token_id, token_id))
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in spans[:_MAX_RANGES_SHOWN]]
    more = len(spans) - len(shown)
    return ", ".join(shown) + (f" and {more} more ranges" if more else "")


def _shown(token: str | None) -> str:
    return "has none" if token is None else repr(token)
