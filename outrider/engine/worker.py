"""Worker: what a service does with a model, as seen from the engine thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from outrider.engine.batch import Span
from outrider.engine.block_manager import Copy

M = TypeVar("M", contravariant=True)
"""A service's messages."""
P = TypeVar("P")
"""A service's notes on a step."""


@dataclass(frozen=True, slots=True)
class Step(Generic[P]):
    """A forward pass to run now.

    Attributes:
        spans: what it computes.
        payload: the worker's own note of what it is for.
        copies: of KV, to be made before.
    """

    spans: Sequence[Span]
    payload: P
    copies: Sequence[Copy] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run for `seconds`, unless a message arrives first."""

    seconds: float


@dataclass(frozen=True, slots=True)
class StepTiming:
    """How a step went.

    Attributes:
        started: `time.monotonic()` when it began.
        measure: gives the milliseconds of the forward pass, device included; waits for a pass that is still running.
        streams: spans in the step.
        tokens: tokens fed.
    """

    started: float
    measure: Callable[[], float]
    streams: int
    tokens: int


class Worker(Protocol[M, P]):
    """What a service does with a model. All methods run in the engine thread; none may block.

    An exception out of `receive` loses that message; out of `finish` it fails the step; out of `plan` or `fail` it
    stops the engine, because then nobody knows what state the worker is in.
    """

    def receive(self, message: M) -> None:
        """Takes in a submitted message."""

    def plan(self) -> Step[P] | Wait | None:
        """What to run next: a step; nothing for a while; or (None) nothing until the next message."""

    def finish(self, step: Step[P], logits: Tensor, timing: StepTiming) -> None:
        """Uses a step's logits, float32 [sum of wanted, vocab_rows] on the model's device, which may still compute."""

    def fail(self, step: Step[P], error: Exception) -> None:
        """The step could not be run or finished: answers its items with an error and frees what they held."""
