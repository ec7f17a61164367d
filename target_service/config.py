"""The target service's configuration: the defaults that differ from the draft's, and one check of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.engine.config import EngineConfig
from outrider.errors import InvalidArgument
from outrider.rpc.options import TARGET_PORT
from outrider.service import config as common
from outrider.service.config import ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig(ServiceConfig):
    """How the target service runs; the flags have the same names with dashes."""

    port: int = TARGET_PORT
    max_slots: int = 32
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        ServiceConfig.__post_init__(self)  # a class with slots is made twice, which breaks super()
        if self.max_num_batched_tokens <= self.max_slots:
            raise InvalidArgument(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} rows cannot hold max_slots + 1 = {self.max_slots + 1} of one stream",
            )
        self.engine()  # which checks what is its own, so that a file's faults come out all at once

    def engine(self) -> EngineConfig:
        """As the base's; a round wants a row of logits for each slot and one behind them.

        Raises:
            InvalidArgument: naming the field.
        """
        return replace(ServiceConfig.engine(self), logits_rows=self.max_num_seqs * (self.max_slots + 1))


def parse(arguments: Sequence[str]) -> TargetConfig:
    """As `outrider.service.config.parse`."""
    return common.parse(
        TargetConfig, "target", "python -m target_service", "Verifies drafted tokens for a coordinator.", arguments
    )
