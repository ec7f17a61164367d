"""How a process writes its log: as text for people, or one JSON object per line for machines."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

TEXT, JSON = "text", "json"
LOG_FORMATS = (TEXT, JSON)

FIELDS = "outrider"
"""Key of `extra` under which a record carries fields of its own."""


class JsonLines(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `part`, `message`, the record's own fields, and `trace` of an exception."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{second}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "part": self._part,
            "message": record.getMessage(),
        }
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def write_json(part: str, level: int | str = logging.INFO) -> None:
    """From now on this process logs JSON lines to standard error, whatever was set up before; `part` is its name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(part))
    logging.basicConfig(level=level, handlers=[handler], force=True)
