"""How late the event loop is: everything that decodes or answers waits for its turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_PERIOD_S = 0.05


async def watch(observe: Callable[[float], None]) -> None:
    """Asks to be woken again and again, and reports by how many seconds that was late. Runs until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + _PERIOD_S
        await asyncio.sleep(_PERIOD_S)
        observe(max(0.0, loop.time() - due_s))
