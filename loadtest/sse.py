"""Server-sent events from bytes that the network cut wherever it liked."""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""A carriage return at the very end may be the first half of one line end, so it waits for the next byte."""


class EventParser:
    """Collects the `data` of events. A read is not an event: one may hold half of one, or five.

    Source: WHATWG HTML, section 9.2.6. Comments and other fields are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[str]:
        """The data of the events that these bytes complete, in order."""
        *lines, self._rest = _LINE_END.split(self._rest + data)
        return self._take(lines)

    def finish(self) -> list[str]:
        """The data of an event that the end of the stream completes, where the final blank line is missing."""
        lines, self._rest = [self._rest.rstrip(b"\r"), b""], b""
        return self._take(lines)

    def _take(self, lines: list[bytes]) -> list[str]:
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append("\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
        return events
