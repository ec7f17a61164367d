"""The draft service's configuration: what a draft has beyond `ServiceConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.errors import InvalidArgument
from outrider.rpc.options import DRAFT_PORT
from outrider.service import config as common
from outrider.service.config import ServiceConfig, between

SampleMethod = Literal["probabilistic", "greedy"]

NGRAM = "ngram"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(ServiceConfig):
    """How the draft service runs; the flags have the same names with dashes.

    Beside a causal LM, `model` may be the folder of an EAGLE-3 head, or `ngram` for prompt lookup. Streams longer than
    `max_model_len` get no slots.

    Attributes:
        draft_top_k: ids in a shipped q at most.
        draft_sample_method: `probabilistic` draws from q; `greedy` takes the argmax and ships a one-hot q.
        embeddings: folder or name of the target whose embeddings an EAGLE-3 head uses; unset means the head's own, or
            those of the target that its files name.
        feature_window: positions with features of the target that an EAGLE-3 head looks back; unset means the head's
            own, or 64.
        prompt_lookup_min: shortest n-gram that is looked up.
        prompt_lookup_max: longest one.
    """

    port: int = DRAFT_PORT
    max_slots: int = 16
    drain_s: float = 5.0
    draft_top_k: int = 128
    draft_sample_method: SampleMethod = "probabilistic"
    embeddings: str | None = None
    feature_window: int | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        ServiceConfig.__post_init__(self)  # a class with slots is made twice, which breaks super()
        between("draft_top_k", self.draft_top_k, 1, 1_024)
        if self.feature_window is not None:
            between("feature_window", self.feature_window, 1, 4_096)
        between("prompt_lookup_min", self.prompt_lookup_min, 1, 32)
        between("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, 32)
        if self.draft_sample_method not in ("probabilistic", "greedy"):
            raise InvalidArgument("draft_sample_method", f"{self.draft_sample_method!r} is not probabilistic or greedy")

    @property
    def is_ngram(self) -> bool:
        return self.model == NGRAM


def parse(arguments: Sequence[str]) -> DraftConfig:
    """As `outrider.service.config.parse`."""
    return common.parse(DraftConfig, "python -m draft_service", "Proposes tokens to a coordinator.", arguments)
