"""SIGTERM, for commands that have something to stop."""

from __future__ import annotations

import signal


class TerminationInterrupts:
    """SIGTERM stops like Ctrl-C: an orderly end either way."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, self._interrupt)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    @staticmethod
    def _interrupt(*_: object) -> None:
        raise KeyboardInterrupt
