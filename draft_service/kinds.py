"""The kinds of draft, and which one a configuration asks for. Free of torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from draft_service.config import NGRAM, SUFFIX, DraftConfig
from outrider import mtp
from outrider.fetch.folder import is_head, read_json
from outrider.models import STUB_PREFIX


class Kind(StrEnum):
    """What drafts; the values are `draft_kind` in GetInfo."""

    CAUSAL_LM = "causal_lm"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    STUB = "stub"


LOOKUPS = frozenset({Kind.NGRAM, Kind.SUFFIX})
HEADS = frozenset({Kind.EAGLE3, Kind.MTP})


def kind_of(config: DraftConfig) -> Kind:
    """The kind that a configuration's model is; a folder is told by its `config.json`."""
    if config.model in (NGRAM, SUFFIX):
        return Kind(config.model)
    if config.model.startswith(STUB_PREFIX):
        return Kind.STUB
    if mtp.is_mtp(config.model):
        return Kind.MTP
    return Kind.EAGLE3 if is_head(read_json(Path(config.model) / "config.json")) else Kind.CAUSAL_LM
