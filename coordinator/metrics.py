"""Prometheus series that requests move. Names follow vLLM's with another prefix; every series exists from the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHED = ("stop", "length", "abort", "error")
"""Labels of `request_success`: as in vLLM it counts every answer's end, whatever its reason."""

PREFIX = "outrider"
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5)
_E2E_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """The series that requests move."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}:{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{PREFIX}:{name}", text, buckets=buckets, registry=self.registry)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered requests.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.requests = counter("request_success", "Answers by the reason of their end.", "finished_reason")
        self.rejected = counter("request_rejected", "Requests that were refused, by HTTP status.", "status")
        self.ignored_fields = counter("ignored_request_fields", "Unknown fields in request bodies.")
        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first generated token.", _TTFT_S)
        self.itl = histogram(
            "inter_token_latency_seconds",
            "Per generated token: time since the last round / tokens of this one.",
            _ITL_S,
        )
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the end of the answer.", _E2E_S)
        self.loop_lag = histogram("event_loop_lag_seconds", "By how much turns of the event loop are late.", _LAG_S)
        text = "Set rate at which drafted tokens are accepted, for measuring only; -1 where texts are exact."
        self.synthetic_acceptance = Gauge(f"{PREFIX}:synthetic_acceptance", text, registry=self.registry)
        self.synthetic_acceptance.set(-1)
        for reason in FINISHED:
            self.requests.labels(reason)
        for status in ("400", "401", "404", "413", "429", "500", "503", "504"):
            self.rejected.labels(status)

    def watch(
        self, running: Callable[[], int], waiting: Callable[[], int], planted_errors: Callable[[], Mapping[str, bool]]
    ) -> None:
        """Export what is read when the series are."""
        for name, text, read in (
            ("num_requests_running", "Answers being decoded.", running),
            ("num_requests_waiting", "Answers waiting for a place.", waiting),
        ):
            Gauge(f"{PREFIX}:{name}", text, registry=self.registry).set_function(read)
        text = "Whether the part lets requests ask for errors on purpose."
        allows = Gauge(f"{PREFIX}:planted_errors", text, ("part",), registry=self.registry)
        for part in ("coordinator", "target", "draft"):
            allows.labels(part).set_function(partial(_allows, planted_errors, part))

    def render(self) -> bytes:
        """The exposition text."""
        return bytes(generate_latest(self.registry))


def _allows(planted_errors: Callable[[], Mapping[str, bool]], part: str) -> float:
    return float(planted_errors().get(part, False))
