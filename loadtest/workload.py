"""What is asked of the server: prompts, lengths, sampling, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from loadtest import arrivals
from loadtest.client import Endpoint
from loadtest.loop import Call
from loadtest.prompts import Prompt, PromptPool
from outrider.errors import InvalidArgument

DEFAULT_OUTPUT_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Fields of every request's body.

    Attributes:
        output_tokens: `max_tokens`; None takes the data set's, else 128.
        ignore_eos: whether answers run to their full length, so that two arms write equally much.
        seed: the first request's; each one after it counts up. None sends none.
        extra: further fields, as they are.
    """

    output_tokens: int | None = None
    temperature: float | None = 0.0
    ignore_eos: bool = False
    seed: int | None = None
    stream: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.output_tokens is not None and self.output_tokens < 1:
            raise InvalidArgument("output-len", f"must be at least 1, got {self.output_tokens}")

    def fields(self, prompt: Prompt, index: int) -> dict[str, Any]:
        """For the `index`-th request."""
        fields: dict[str, Any] = {"max_tokens": self.output_tokens or prompt.output_tokens or DEFAULT_OUTPUT_TOKENS}
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.seed is not None:
            fields["seed"] = self.seed + index
        return {**fields, **self.extra}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests are spread over time.

    Attributes:
        request_rate: planned requests per second; None is a closed loop of `max_concurrency` lanes.
        trace: file whose arrivals are replayed.
    """

    num_prompts: int
    request_rate: float | None = None
    burstiness: float = 1.0
    arrival: Literal["poisson", "constant"] = "poisson"
    trace: Path | None = None
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise InvalidArgument("num-prompts", f"must be at least 1, got {self.num_prompts}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise InvalidArgument("max-concurrency", f"must be at least 1, got {self.max_concurrency}")
        if self.trace is not None and self.request_rate is not None:
            raise InvalidArgument("trace", "brings its own arrivals; leave --request-rate out")

    @property
    def lanes(self) -> int | None:
        """Requests under way at most; a closed loop needs a number, one by default."""
        return self.max_concurrency or (1 if self.request_rate is None and self.trace is None else None)

    def plan(self, rng: np.random.Generator) -> list[arrivals.TraceEntry] | None:
        """When each request is to be sent; None for a closed loop."""
        if self.trace is not None:
            return arrivals.trace(self.trace)[: self.num_prompts]
        if self.request_rate is None:
            return None
        offsets = (
            arrivals.constant(self.num_prompts, self.request_rate)
            if self.arrival == "constant"
            else arrivals.poisson(self.num_prompts, self.request_rate, self.burstiness, rng)
        )
        return [arrivals.TraceEntry(offset, None) for offset in offsets]


def calls(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    planned: Sequence[arrivals.TraceEntry] | None,
) -> list[Call]:
    """The requests of a run."""
    made = []
    for index, prompt in enumerate(prompts):
        fields = sampling.fields(prompt, index)
        if planned is not None and planned[index].output_tokens is not None:
            fields["max_tokens"] = planned[index].output_tokens
        body = endpoint.body(prompt.text, stream=sampling.stream, each_usage=False, fields=fields)
        made.append(Call(body, prompt.task, None if planned is None else planned[index].at_s))
    return made


def warm_up(endpoint: Endpoint, pool: PromptPool, sampling: Sampling, count: int) -> list[Call]:
    """Requests before the measurement, with prompts of their own."""
    return calls(endpoint, pool.fresh(pool.take(count)), sampling, None)
