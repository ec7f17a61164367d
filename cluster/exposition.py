"""Prometheus series of several processes as those of one.

Counters and histograms are added up, also those of processes that are gone: a sum that falls would read as a restart,
and a rate over it as traffic that never was. Gauges are of processes that are there: those that count something are
added up, of times the earliest is taken, and of all others the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_COUNTING = ("num_requests_running", "num_requests_waiting", "links_up", "links_wanted")
"""Ends of the names of gauges that are added up."""
_CREATED = "_created"
_TIMES = (_CREATED, "_timestamp_seconds")
_ADDED = ("counter", "histogram", "summary")


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def merge(live: Iterable[str], gone: Iterable[str] = ()) -> str:
    """
    Args:
        live: exposition texts of the processes that are there.
        gone: last texts of those that are not.
    """
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text, is_gone in [*((text, False) for text in live), *((text, True) for text in gone)]:
        for family in text_string_to_metric_families(text):
            if is_gone and family.type not in _ADDED and not family.name.endswith(_CREATED):
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            of_family = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                of_family[key] = _combine(family, of_family.get(key), sample.value)
    for name, family in families.items():
        for (series, labels), value in values[name].items():
            family.add_sample(series, dict(labels), value)
    return generate_latest(_Families(families.values())).decode()  # type: ignore[arg-type]  # it only collects


def _combine(family: Metric, before: float | None, value: float) -> float:
    if before is None:
        return value
    if family.name.endswith(_TIMES):
        return min(before, value)
    if family.type in _ADDED or family.name.endswith(_COUNTING):
        return before + value
    return max(before, value)
