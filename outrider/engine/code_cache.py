"""Where compiled code is kept for the next start; said before torch is imported, which otherwise takes /tmp."""

from __future__ import annotations

import os
from pathlib import Path

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_code(folder: Path) -> None:
    """Has inductor keep its code there, unless the operator has chosen a place."""
    os.environ.setdefault(_VARIABLE, str(folder))
