"""Prometheus series of what the coordinator is attached to, and of how long its certificates last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.metrics import PREFIX
from coordinator.parts import DecoderState

logger = logging.getLogger(__name__)


class PartSeries(Collector):
    """Links that are up, links that there should be, KV in use and steps replayed, by part; and drift of acceptance."""

    def __init__(self, state: Callable[[], DecoderState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        up = {"target": state.targets_up, "draft": int(state.draft is not None)}
        missing = {part: sum(entry.part == part for entry in state.degraded) for part in up}
        text = "Services that the coordinator is attached to."
        yield _labelled("links_up", text, "part", up)
        text = "Share of the service's KV blocks in use, from 0 to 1, a few seconds old; 0 without a KV cache."
        yield _labelled("kv_cache_usage_perc", text, "side", {part: state.kv_use.get(part, 0.0) for part in up})
        text = "Share of the service's steps since its start that were replayed from CUDA graphs, from 0 to 1."
        yield _labelled("graph_replay_perc", text, "side", {part: state.replayed.get(part, 0.0) for part in up})
        text = "By how much less the first drafted token is accepted than at the baseline; 0 while it is learnt."
        yield GaugeMetricFamily(f"{PREFIX}:acceptance_drift", text, value=state.acceptance.drop)
        text = "1 where that is more than chance explains."
        yield GaugeMetricFamily(f"{PREFIX}:acceptance_drifted", text, value=float(state.acceptance.drifted))
        text = "Services that it was told of; fewer links up than wanted means degraded."
        yield _labelled("links_wanted", text, "part", {part: up[part] + missing[part] for part in up})

    def describe(self) -> Iterable[Metric]:
        return self.collect()


class CertificateSeries(Collector):
    """When each certificate file expires; read anew with each scrape, since files are exchanged."""

    def __init__(self, paths: Sequence[str | None]) -> None:
        self._paths = sorted({path for path in paths if path is not None})

    def collect(self) -> Iterator[Metric]:
        text = "When the certificate in this file expires, in seconds since the epoch; 0 if it cannot be read."
        yield _labelled("certificate_expiry_timestamp_seconds", text, "file", {p: _expires(p) for p in self._paths})

    def describe(self) -> Iterable[Metric]:
        return self.collect()


def _expires(path: str) -> float:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(Path(path).read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError) as error:
        logger.debug("%s: %s", path, error)
        return 0.0


def _labelled(name: str, text: str, label: str, values: dict[str, int] | dict[str, float]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}:{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
