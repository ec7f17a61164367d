"""The accelerators of this machine, numbered as nvidia-smi numbers them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import InvalidArgument

_QUERY = "index,uuid,name,memory.free,memory.total,driver_version"
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU. Sizes in bytes."""

    index: int
    uuid: str
    name: str
    free_bytes: int
    total_bytes: int
    driver: str = ""


def cards() -> tuple[Card, ...]:
    """The GPUs that nvidia-smi lists; empty where there is none or no driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode != 0:
        return ()
    found = []
    for line in answer.stdout.splitlines():
        index, uuid, name, free, total, driver = (field.strip() for field in line.split(","))
        found.append(Card(int(index), uuid, name, int(free) * _MIB, int(total) * _MIB, driver))
    return tuple(found)


def pick(field: str, wanted: str, available: Sequence[Card]) -> tuple[Card, ...] | None:
    """The cards named by `0`, `0,1` or UUIDs; None for `cpu`.

    Raises:
        InvalidArgument: a name that is no card of this machine; the message lists those there are.
    """
    if wanted == "cpu":
        return None
    chosen = []
    for name in wanted.split(","):
        match = [card for card in available if name.strip() in (str(card.index), card.uuid)]
        if not match:
            listed = ", ".join(f"{card.index} ({card.name}, {card.uuid})" for card in available) or "none"
            raise InvalidArgument(field, f"no GPU {name.strip()!r} on this machine; there are: {listed}")
        chosen.append(match[0])
    if len({card.uuid for card in chosen}) != len(chosen):
        raise InvalidArgument(field, f"{wanted!r} names a card twice")
    return tuple(chosen)
