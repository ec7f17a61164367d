"""Prometheus series of what the coordinator takes steps and proposals to cost, as it plans with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.costs import Costs
from coordinator.metrics import PREFIX

TARGET_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class CostSeries(Collector):
    """Exports `Costs` at some sizes; a size of which nothing is known is 0."""

    def __init__(self, costs: Costs, slots: int) -> None:
        """`slots` is the largest number of drafted tokens per round."""
        self._costs = costs
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        costs = self._costs
        text = "What a target step of so many token rows, or a proposal of so many slots, is taken to cost."
        family = GaugeMetricFamily(f"{PREFIX}:cost_seconds", text, labels=["side", "size"])
        for size in TARGET_ROWS:
            family.add_metric(["target", str(size)], float(costs.target.predict(size)))
        for size in range(1, self._slots + 1):
            family.add_metric(["draft", str(size)], float(costs.draft.predict(size)))
        yield family
        text = "The way to the target and back, without the target's own time."
        yield GaugeMetricFamily(f"{PREFIX}:link_seconds", text, value=costs.link_s)
        text = "1 where costs start from what the service measured of itself, 0 where requests alone teach them."
        family = GaugeMetricFamily(f"{PREFIX}:cost_profile", text, labels=["side"])
        family.add_metric(["target"], float(costs.target_profile is not None))
        family.add_metric(["draft"], float(costs.draft_profile is not None))
        yield family

    def describe(self) -> Iterable[Metric]:
        return self.collect()
