"""Start-up phases that a service announces and its launcher shows: resolve, download, load, probe, memory, graphs,
ready."""

from __future__ import annotations

import re
import sys

_LINE = re.compile(r"^phase: (?P<phase>[a-z]+)(?: \((?P<detail>.*)\))?$")


def announce(phase: str, detail: str = "") -> None:
    """Write the phase line to standard error, where a launcher (or a person) reads it."""
    sys.stderr.write(f"phase: {phase} ({detail})\n" if detail else f"phase: {phase}\n")
    sys.stderr.flush()


def parse(line: str) -> tuple[str, str] | None:
    """(phase, detail) of a phase line, or None for any other line."""
    match = _LINE.match(line.strip())
    return (match["phase"], match["detail"] or "") if match else None
