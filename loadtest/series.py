"""What a server says about itself on `/metrics`, read before and after a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from loadtest.client import Client
from outrider.errors import Unavailable

Labels = tuple[tuple[str, str], ...]
_PREFIXES = ("outrider:", "vllm:", "sglang:")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every sample, by name (the server's prefix cut off) and labels."""

    samples: Mapping[tuple[str, Labels], float]

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name that carry these labels; 0 where there are none."""
        wanted = labels.items()
        return sum(
            value for (key, own), value in self.samples.items() if key == name and all(item in own for item in wanted)
        )

    def since(self, before: Snapshot) -> Snapshot:
        """What was counted in between."""
        return Snapshot({key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()})

    def plus(self, other: Snapshot) -> Snapshot:
        """What was counted in both of two spans."""
        keys = self.samples.keys() | other.samples.keys()
        return Snapshot({key: self.samples.get(key, 0.0) + other.samples.get(key, 0.0) for key in keys})


def parse(text: str) -> Snapshot:
    """Read the exposition text."""
    samples: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            for prefix in _PREFIXES:
                name = name.removeprefix(prefix)
            samples[name, tuple(sorted(sample.labels.items()))] = sample.value
    return Snapshot(samples)


async def scrape(client: Client) -> Snapshot | None:
    """The server's series now; None where it has none."""
    text = await client.text("/metrics")
    try:
        return None if text is None else parse(text)
    except ValueError:
        return None


async def refuse_busy(client: Client) -> str | None:
    """Refuse a server that answers somebody else, whose requests would be measured too.

    Returns:
        What could not be checked, or None.

    Raises:
        Unavailable: requests are running or waiting there.
    """
    now = await scrape(client)
    if now is None or not any(name == "num_requests_running" for name, _ in now.samples):
        return "the server does not say how many requests it is answering, so nobody checked that it is idle"
    running, waiting = now.value("num_requests_running"), now.value("num_requests_waiting")
    if running + waiting > 0:
        raise Unavailable(
            f"{client.endpoint.url} is answering {running:g} other requests ({waiting:g} wait); "
            "figures would be theirs too. Wait, or say --allow-busy"
        )
    return None
