"""EngineBackend: the part of a backend that every one with an engine thread has."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from outrider.engine.runner import Runner

Message = TypeVar("Message")


class EngineBackend(Generic[Message]):
    """An engine thread as a service sees it; subclasses say what is built in it, and what it is."""

    def __init__(self, build: Callable[[], tuple[Any, Any]], on_fatal: Callable[[BaseException], None]) -> None:
        """
        Args:
            build: makes model and worker; runs in the engine thread.
            on_fatal: called, in the engine thread, when the engine stops for good.
        """
        self._runner: Runner[Message, Any] = Runner(build, on_fatal=on_fatal)

    @property
    def ready(self) -> Future[None]:
        """Resolves when the model is loaded, or holds the reason why it is not."""
        return self._runner.ready

    @property
    def is_stuck(self) -> bool:
        """Whether a step hangs."""
        return self._runner.is_stuck

    def start(self) -> None:
        """Begins to load."""
        self._runner.start()

    def submit(self, message: Message) -> None:
        """Takes a message to the engine thread.

        Raises:
            Unavailable: the engine has stopped.
        """
        self._runner.submit(message)

    def tick(self) -> None:
        """Nothing to do: the engine thread wakes by itself when a lease ends."""

    def close(self) -> None:
        """Ends the engine thread."""
        self._runner.close()
