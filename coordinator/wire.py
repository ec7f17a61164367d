"""What crosses the links, by what it is for: distributions, features, and all the rest, which is ids."""

from __future__ import annotations

from typing import Any

KINDS = ("q", "features", "ids")

_SLOT_COLUMNS = ("own_counts", "support_sizes", "q_ids", "q_counts", "dense_q")
_VERDICT_COLUMNS = ("p", "dense_p")


def count(message: Any, into: dict[str, int]) -> None:
    """Adds a message of a link, in bytes: q (and p), features, ids (and everything else)."""
    size = message.ByteSize()
    fields = message.DESCRIPTOR.fields_by_name
    q = sum(len(getattr(message, name)) for name in _VERDICT_COLUMNS if name in fields)
    if "slots" in fields and fields["slots"].message_type is not None:
        q += sum(len(getattr(message.slots, name)) for name in _SLOT_COLUMNS)
    features = message.features.ByteSize() if "features" in fields else 0
    into["q"] += q
    into["features"] += features
    into["ids"] += size - q - features
