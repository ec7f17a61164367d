"""`schedule.json`: the best gamma by batch size, as `outrider bench sweep` measured it."""

from __future__ import annotations

import json
from pathlib import Path

from coordinator.gamma import SizeRange, size_ranges
from outrider.errors import InvalidArgument

TABLE = "num_speculative_tokens_per_batch_size"


def read_schedule(path: Path, largest_gamma: int) -> tuple[SizeRange, ...]:
    """The table of a schedule file; what else the file says (where and when it was measured) is for people.

    Raises:
        InvalidArgument: it cannot be read, holds no table, or the table makes no sense.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument("schedule", f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or TABLE not in content:
        raise InvalidArgument("schedule", f"{path} has no {TABLE}; `outrider bench sweep` writes such files")
    return size_ranges(content[TABLE], largest_gamma)
