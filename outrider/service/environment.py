"""What a process that computes has to say before torch is imported, which reads all of it once."""

from __future__ import annotations

import os

from outrider.engine.blas import pin_blas
from outrider.engine.code_cache import keep_compiled_code
from outrider.fetch.cache import cache_root
from outrider.service.cards import number_as_listed


def set_environment() -> None:
    """Fixes the BLAS path, the numbers of cards and the place of compiled code, unless the operator has.

    Raises:
        RuntimeError: torch was imported already.
    """
    pin_blas()
    number_as_listed(os.environ)
    keep_compiled_code(cache_root() / "inductor")
