"""A pair without weights whose draft is often rejected: Markov laws over bytes, in files that stub models read.

Behind each of eight letters come the same letters with other chances; the draft orders them otherwise, so that 36 % of
what it proposes is rejected. Behind any other byte one letter is certain, so that samples begin alike and differ from
their second token on. No two chances of a row are equal, so nothing ties.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

_ROWS = 258
_LETTERS = tuple(b"abcdefgh")
_TARGET = (0.34, 0.22, 0.15, 0.11, 0.08, 0.05, 0.03, 0.02)
_DRAFT = (0.16, 0.35, 0.05, 0.21, 0.02, 0.12, 0.01, 0.08)


class StubPair(NamedTuple):
    """Model names for the two services."""

    target: str
    draft: str


def write(folder: Path) -> StubPair:
    """Writes both tables into a folder, which must live as long as the services do."""
    target, draft = folder / "target.json", folder / "draft.json"
    target.write_text(json.dumps(table(_TARGET)))
    draft.write_text(json.dumps(table(_DRAFT)))
    return StubPair(f"stub:markov?table={quote(str(target))}", f"stub:table?file={quote(str(draft))}")


def table(law: tuple[float, ...]) -> list[list[float]]:
    """Rows of 258 chances: behind letter t the letters have `law`, turned round by t."""
    rows = []
    for token in range(_ROWS):
        row = [0.0] * _ROWS
        for index, chance in enumerate(law if token in _LETTERS else (1.0,)):
            row[_LETTERS[(index + token) % len(_LETTERS)]] = chance
        rows.append(row)
    return rows
