"""Grammar: what the text of an answer must match, as it crosses the wire. Knows no library; see `outrider.guidance`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from outrider.errors import InvalidArgument

MAX_GRAMMAR = 65_536
"""Characters of a grammar's text at most."""


class GrammarKind(IntEnum):
    """How the text of a grammar is read; the values travel in `SamplingParams`."""

    JSON_SCHEMA = 1
    """A JSON schema."""
    REGEX = 2
    """A regular expression that the whole answer matches (Rust's syntax: no look-around, no back-references)."""
    CHOICE = 3
    """A JSON list of texts, one of which is the answer."""
    TOOL_CALLS = 4
    """Calls between `<tool_call>` tags and nothing else: a JSON object with `functions` (name -> schema of the
    arguments) and `several` (whether calls may follow the first)."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match from its first character to its last.

    Attributes:
        kind: how `text` is read.
        text: not empty; at most `MAX_GRAMMAR` characters.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if not 0 < len(self.text) <= MAX_GRAMMAR:
            raise InvalidArgument("grammar", f"has {len(self.text)} characters; from 1 to {MAX_GRAMMAR} are taken")
