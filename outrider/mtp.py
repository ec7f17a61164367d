"""MTP drafts by name: `mtp:MODEL` is the multi-token-prediction layer that MODEL's own checkpoint brings.

`mtp` alone means that of the target it is to draft for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MTP = "mtp"
PREFIX = "mtp:"
_ELEMENT_BYTES = 2


def is_mtp(name: str) -> bool:
    """Whether a draft's name means an MTP layer."""
    return name == MTP or name.startswith(PREFIX)


def checkpoint(name: str) -> str:
    """The model, or folder, whose MTP layer `name` means."""
    return name.removeprefix(PREFIX)


def of_target(draft: str, target: str) -> str:
    """A draft's full name beside this target."""
    return PREFIX + target if draft == MTP else draft


def share_of(config: Mapping[str, Any], weight_bytes: int) -> int:
    """About how many bytes of a checkpoint an MTP draft loads: one layer, embeddings and output head."""
    text = config.get("text_config", config)
    layers = int(text.get("num_hidden_layers") or 1) + int(text.get("num_nextn_predict_layers") or 1)
    tables = 2 * _ELEMENT_BYTES * int(text.get("vocab_size") or 0) * int(text.get("hidden_size") or 0)
    return tables + max(weight_bytes - tables, 0) // layers
