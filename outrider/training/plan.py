"""What a training run will take: the budget it was given, and an estimate from a short trial on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

GENERATING_SHARE = 0.4
"""Of a budget in hours: what goes into answers; the rest trains on them."""

PASSES = 8
"""Of a budget in tokens: how often each is trained on."""

_MINUTE_S = 60.0


class Stage(StrEnum):
    """What a process does. Two processes can share a work folder: one answers, the other trains on what is there."""

    BOTH = "both"
    ANSWERS = "answers"
    TRAINING = "training"


class Kind(StrEnum):
    """What a run trains: a head on the target's features, or a pruned copy of the target."""

    EAGLE3 = "eagle3"
    LM = "lm"


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be spent, in one of two forms.

    Attributes:
        hours: Of everything that `stage` names, over all resumed runs.
        tokens: Answer tokens to generate; training then passes over them `PASSES` times.
        stage: What is done; a single stage has all the hours.
    """

    hours: float | None = None
    tokens: int | None = None
    stage: Stage = Stage.BOTH

    def generated(self, seconds: float, tokens: int) -> float:
        """Share of the generation that is done."""
        if self.tokens is not None:
            return tokens / self.tokens
        return seconds / max(1.0, self._total_s * self._generating_share)

    def trained(self, generating_s: float, training_s: float, trained_tokens: int) -> float:
        """Share of the training that is done."""
        if self.tokens is not None:
            return trained_tokens / (self.tokens * PASSES)
        spent_s = generating_s if self.stage is Stage.BOTH else 0.0
        return training_s / max(1.0, self._total_s - spent_s)

    def split(self) -> tuple[float, float]:
        """Seconds to generate and to train of a budget in hours."""
        return self._total_s * self._generating_share, self._total_s * (1 - self._generating_share)

    @property
    def _generating_share(self) -> float:
        return {Stage.BOTH: GENERATING_SHARE, Stage.ANSWERS: 1.0, Stage.TRAINING: 0.0}[self.stage]

    @property
    def _total_s(self) -> float:
        if self.hours is None:
            raise ValueError("a budget has hours or tokens")
        return self.hours * 3600


@dataclass(frozen=True, slots=True)
class Speed:
    """What the trial measured; tokens are answer tokens.

    Attributes:
        generated_per_s: Tokens generated per second, features and distributions included.
        trained_per_s: Tokens trained on per second.
        bytes_per_token: Of the shards on disk.
    """

    generated_per_s: float
    trained_per_s: float
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run will take. `tokens` are generated, `trained_tokens` trained on (each several times)."""

    generating_s: float
    training_s: float
    tokens: int
    trained_tokens: int
    disk_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens to generate ({self.generating_s / _MINUTE_S:.0f} min, "
            f"{self.disk_bytes / 1e9:.2f} GB on disk), {self.trained_tokens:,} to train on "
            f"({self.training_s / _MINUTE_S:.0f} min)"
        )


def estimate(budget: Budget, speed: Speed) -> Estimate:
    """The two budgets, each turned into the terms of the other."""
    if budget.tokens is not None:
        tokens, trained = budget.tokens, budget.tokens * PASSES
        generating_s, training_s = tokens / speed.generated_per_s, trained / speed.trained_per_s
    else:
        generating_s, training_s = budget.split()
        tokens, trained = int(generating_s * speed.generated_per_s), int(training_s * speed.trained_per_s)
    return Estimate(generating_s, training_s, tokens, trained, int(tokens * speed.bytes_per_token))
