"""One look at a coordinator: the values of its /metrics and what its /ready says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from outrider.errors import Unauthenticated, Unavailable

PREFIX = "outrider:"
Series = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True, slots=True)
class Sample:
    """
    Attributes:
        at_s: of a monotonic clock.
        series: value by name (without prefix) and sorted labels.
        ready: the body of /ready.
        is_ready: whether requests are taken.
    """

    at_s: float
    series: Series
    ready: Mapping[str, Any]
    is_ready: bool

    def value(self, name: str, **labels: str) -> float:
        """Of one series; 0 where the server does not have it."""
        return self.series.get((name, tuple(sorted(labels.items()))), 0.0)

    def labels(self, name: str, label: str) -> list[str]:
        """The values that a label takes in the series of this name, in the server's order."""
        return [dict(labels)[label] for series, labels in self.series if series == name and label in dict(labels)]


def parse(metrics: str, ready: Mapping[str, Any], *, is_ready: bool, at_s: float) -> Sample:
    """A sample from what the two paths answered."""
    series = {
        (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in text_string_to_metric_families(metrics)
        if family.name.startswith(PREFIX)
        for sample in family.samples
    }
    return Sample(at_s, series, ready, is_ready)


def take(client: httpx.Client) -> Sample:
    """Asks a coordinator; `client` has its URL as base.

    Raises:
        Unavailable: it does not answer, or is no coordinator.
        Unauthenticated: it wants an API key.
    """
    try:
        metrics, ready = client.get("/metrics"), client.get("/ready")
        if metrics.status_code == 401:
            raise Unauthenticated("the coordinator wants an API key for /metrics: put it into OUTRIDER_API_KEY")
        metrics.raise_for_status()
        body = ready.json()
        sample = parse(metrics.text, body, is_ready=ready.status_code == 200, at_s=time.monotonic())
    except (httpx.HTTPError, ValueError) as error:
        raise Unavailable(f"{client.base_url} does not answer as a coordinator does ({error})") from None
    if not sample.series:
        raise Unavailable(f"{client.base_url} is no coordinator: its /metrics has no series of Outrider")
    return sample
