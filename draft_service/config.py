"""The draft service's configuration: what a draft has beyond `ServiceConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.errors import InvalidArgument
from outrider.models import LOOKUP_DRAFTS
from outrider.rpc.options import DRAFT_PORT
from outrider.service import config as common
from outrider.service.config import ServiceConfig, between

SampleMethod = Literal["probabilistic", "greedy"]

NGRAM = "ngram"
SUFFIX = "suffix"
_LONGEST_NGRAM = 4
_SUFFIX_WINDOW = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(ServiceConfig):
    """How the draft service runs; the flags have the same names with dashes.

    Beside a causal LM, `model` may be the folder of an EAGLE-3 head, `mtp:` and the target's name or folder for the MTP
    layer of its checkpoint, `ngram` for prompt lookup, or `suffix` for a suffix automaton. Streams longer than
    `max_model_len` get no slots.

    Attributes:
        draft_top_k: ids in a shipped q at most.
        draft_sample_method: `probabilistic` draws from q; `greedy` takes the argmax and ships a one-hot q.
        embeddings: folder or name of the target whose embeddings an EAGLE-3 head uses; unset means the head's own, or
            those of the target that its files name.
        feature_window: positions with features of the target that a head (EAGLE-3 or MTP) looks back; unset means the
            head's own, or 64.
        draft_window: a draft model keeps the KV of the first 4 and the last so many positions, in whole blocks; unset
            means of all. Only the acceptance depends on it.
        prompt_lookup_min: shortest match that `ngram` and `suffix` go on from.
        prompt_lookup_max: longest n-gram that is looked up; unset means 4. `suffix` knows no longest one.
        suffix_window: `suffix` keeps at least so many of a stream's last tokens, and fewer than twice as many; unset
            means 8192. About half a kilobyte of memory each.
    """

    port: int = DRAFT_PORT
    max_slots: int = 16
    drain_seconds: float = 5.0
    draft_top_k: int = 128
    draft_sample_method: SampleMethod = "probabilistic"
    embeddings: str | None = None
    feature_window: int | None = None
    draft_window: int | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int | None = None
    suffix_window: int | None = None

    def __post_init__(self) -> None:
        ServiceConfig.__post_init__(self)  # a class with slots is made twice, which breaks super()
        between("draft_top_k", self.draft_top_k, 1, 1_024)
        if self.feature_window is not None:
            between("feature_window", self.feature_window, 1, 4_096)
        if self.draft_window is not None:
            between("draft_window", self.draft_window, 1, 1 << 20)
            if self.is_lookup:
                raise InvalidArgument("draft_window", f"is for draft models; {self.model} has no KV")
        if self.compile and self.is_lookup:
            raise InvalidArgument("compile", f"is for draft models; {self.model} computes nothing")
        between("prompt_lookup_min", self.prompt_lookup_min, 1, 32)
        if self.model == SUFFIX and self.prompt_lookup_max is not None:
            raise InvalidArgument("prompt_lookup_max", "is for ngram; suffix takes the longest match there is")
        if self.model != SUFFIX:
            between("prompt_lookup_max", self.longest_ngram, self.prompt_lookup_min, 32)
        if self.suffix_window is not None:
            if self.model != SUFFIX:
                raise InvalidArgument("suffix_window", f"is for suffix, not for {self.model}")
            between("suffix_window", self.suffix_window, 64, 1 << 20)
        if self.draft_sample_method not in ("probabilistic", "greedy"):
            raise InvalidArgument("draft_sample_method", f"{self.draft_sample_method!r} is not probabilistic or greedy")
        if not self.is_lookup:
            self.engine()  # which checks what is its own, so that a file's faults come out all at once

    @property
    def is_lookup(self) -> bool:
        """Whether the draft is the text itself: no weights, no torch."""
        return self.model in LOOKUP_DRAFTS

    @property
    def longest_ngram(self) -> int:
        return _LONGEST_NGRAM if self.prompt_lookup_max is None else self.prompt_lookup_max

    @property
    def kept_tokens(self) -> int:
        return _SUFFIX_WINDOW if self.suffix_window is None else self.suffix_window


def parse(arguments: Sequence[str]) -> DraftConfig:
    """As `outrider.service.config.parse`."""
    return common.parse(DraftConfig, "draft", "python -m draft_service", "Proposes tokens to a coordinator.", arguments)
