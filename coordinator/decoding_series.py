"""Prometheus series of the decoding loop, read from its raw counts when they are scraped.

Acceptance rate = accepted / drafted; mean acceptance length = 1 + accepted / drafts; alpha-hat = accepted / tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.counters import Counters
from coordinator.metrics import PREFIX
from outrider.seam import Timings

_STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_SIDES = ("draft", "target")
_STAGES = ("queue", "forward", "sample", "total")


class DecodingSeries(Collector):
    """Exports `Counters`."""

    def __init__(self, counters: Counters, positions: int) -> None:
        """`positions` is the largest number of drafted tokens per round."""
        self._counters = counters
        self._positions = positions
        text = "Where the time of a step went, as the service measured it."
        self._steps = Histogram(f"{PREFIX}:step_seconds", text, ("side", "stage"), buckets=_STEP_S, registry=None)
        for side in _SIDES:
            for stage in _STAGES:
                self._steps.labels(side, stage)
        counters.on_step.append(self._observe)

    def collect(self) -> Iterator[Metric]:
        counters = self._counters
        yield _counter("spec_decode_num_drafts", "Rounds with at least one drafted token.", counters.num_drafts)
        yield _counter("spec_decode_num_draft_tokens", "Drafted tokens sent to the target.", counters.num_draft_tokens)
        yield _counter(
            "spec_decode_num_tested_tokens", "Drafted tokens that the rule looked at.", counters.num_tested_tokens
        )
        yield _counter(
            "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", counters.num_accepted_tokens
        )
        yield _labelled(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens by their position in the draft.",
            "position",
            {str(position): counters.accepted_per_pos[position] for position in range(self._positions)},
        )
        yield _labelled("draft_failures", "What the draft did wrong.", "reason", counters.draft_failures)
        yield _labelled("draft_skipped", "Why tokens were decoded plainly.", "reason", counters.draft_skipped)
        text = "Prompt tokens whose KV a service found, so that it did not have to compute them."
        yield _labelled("prefix_cache_hits", text, "link", counters.prefix_tokens)
        text = "Times that a stream lost its KV on a service to another one, and was computed again."
        yield _labelled("num_preemptions", text, "link", counters.preemptions)
        yield _gamma(counters.gamma)
        yield _wire(counters.wire)
        yield from self._steps.collect()

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def _observe(self, side: str, timings: Timings) -> None:
        for stage in _STAGES:
            self._steps.labels(side, stage).observe(getattr(timings, f"{stage}_ms") / 1_000)


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"{PREFIX}:{name}", text, value=value)


def _labelled(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}:{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _wire(wire: Mapping[str, Mapping[str, int]]) -> Metric:
    text = "Bytes on the links, both ways: distributions, features of the target, and all the rest, which is ids."
    family = CounterMetricFamily(f"{PREFIX}:wire_bytes", text, labels=["link", "kind"])
    for link, kinds in wire.items():
        for kind, value in kinds.items():
            family.add_metric([link, kind], value)
    return family


def _gamma(rounds_by_gamma: list[int]) -> Metric:
    """A histogram whose buckets are the values themselves: gamma is a small integer."""
    buckets, seen = [], 0
    for gamma, rounds in enumerate(rounds_by_gamma):
        seen += rounds
        buckets.append((str(float(gamma)), float(seen)))
    buckets.append(("+Inf", float(seen)))
    total = sum(gamma * rounds for gamma, rounds in enumerate(rounds_by_gamma))
    family = HistogramMetricFamily(f"{PREFIX}:gamma", "Drafted tokens asked for per round; 0 is a plain token.")
    family.add_metric([], buckets, sum_value=total)
    return family
