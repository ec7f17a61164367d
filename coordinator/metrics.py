"""Prometheus series that requests move. Names follow vLLM's with another prefix; every series exists from the start."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHED = ("stop", "length", "abort", "error")
"""Labels of `request_success`: as in vLLM it counts every answer's end, whatever its reason."""

PREFIX = "outrider"
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
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
        for reason in FINISHED:
            self.requests.labels(reason)
        for status in ("400", "404", "429", "500", "503", "504"):
            self.rejected.labels(status)

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Export two numbers that are read when the series are."""
        for name, text, read in (
            ("num_requests_running", "Answers being decoded.", running),
            ("num_requests_waiting", "Answers waiting for a place.", waiting),
        ):
            Gauge(f"{PREFIX}:{name}", text, registry=self.registry).set_function(read)

    def render(self) -> bytes:
        """The exposition text."""
        return bytes(generate_latest(self.registry))
