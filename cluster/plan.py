"""What is to run on the cluster: frozen, complete, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.names import Finder
from cluster.resources import Resources
from coordinator.options import Options
from draft_service.config import DraftConfig
from outrider.errors import InvalidArgument
from outrider.rpc.exposure import guard
from target_service.config import TargetConfig

_MOST_REPLICAS = 1_000
_PROBES = 32
"""Requests beside answers that a replica takes: probes, scrapes, and refusals on their way out."""
_LOAD_SHARE = 0.7
"""Serve adds a coordinator when the others hold more than this share of the answers that they decode at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """All replicas of one service.

    Attributes:
        config: as the process takes it; host and port are chosen where it runs.
        resources: of one replica, as Ray counts them.
    """

    config: TargetConfig | DraftConfig
    replicas: int
    resources: Resources

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= _MOST_REPLICAS:
            raise InvalidArgument(f"{self.role}-replicas", f"must be from 1 to {_MOST_REPLICAS}, got {self.replicas}")

    @property
    def role(self) -> str:
        """`target` or `draft`."""
        return "target" if isinstance(self.config, TargetConfig) else "draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One application.

    Attributes:
        name: of the Serve application, and of everything else that belongs to it.
        draft: None decodes plainly.
        options: of every coordinator; services and listening address are filled in where it runs.
        least_coordinators, most_coordinators: Serve keeps their number between these.
        coordinator_resources: of one of them.
        certs: folder of certificates on every node, as `outrider certs` makes it, or None for plain text.
        insecure: whether plain text between nodes is meant.
    """

    name: str
    target: ServicePlan
    draft: ServicePlan | None
    options: Options
    least_coordinators: int
    most_coordinators: int
    coordinator_resources: Mapping[str, float]
    certs: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or "#" in self.name:
            raise InvalidArgument("name", f"must be a name without / and #, got {self.name!r}")
        if not 1 <= self.least_coordinators <= self.most_coordinators <= _MOST_REPLICAS:
            raise InvalidArgument(
                "coordinator-replicas",
                f"must be a number from 1 to {_MOST_REPLICAS} or a range such as 1-4, got "
                f"{self.least_coordinators}-{self.most_coordinators}",
            )

    @property
    def services(self) -> tuple[ServicePlan, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    def refuse_plain_text(self, host: str) -> None:
        """
        Raises:
            InvalidArgument: `host` is a network's, there are no certificates, and plain text is not meant.
        """
        guard("certs", host, encrypted=self.certs is not None, insecure=self.insecure, remedy="a folder with them")

    @property
    def running(self) -> int:
        """Answers that one coordinator decodes at once: its share of what the targets take in one step."""
        own = self.options.front.max_num_seqs
        return own or math.ceil(self.target.config.max_num_seqs * self.target.replicas / self.least_coordinators)

    @property
    def max_ongoing_requests(self) -> int:
        """What Serve sends to one coordinator: all that its admission lets run and wait, with room to refuse more."""
        front = self.options.front
        # Of each API key as many may wait for a place, and as many again for their prompts to be tokenised.
        waiting = 2 * front.queue_factor * front.api_keys.clients
        return self.running * (1 + waiting) + _PROBES

    @property
    def target_ongoing_requests(self) -> float:
        """The load at which Serve adds a coordinator."""
        return max(1.0, self.running * _LOAD_SHARE)

    def coordinator(self, host: str, ordinal: int) -> Options:
        """Options of one coordinator.

        Args:
            host: address of its node.
            ordinal: among the coordinators, from 0 on; decides which draft it begins with.

        Raises:
            InvalidArgument: its door and links would be plain text on a network, which was not said to be meant.
        """
        self.refuse_plain_text(host)
        drafts = self.draft.replicas if self.draft is not None else 0
        decoder = replace(
            self.options.decoder,
            target=tuple(f"target/{index}" for index in range(self.target.replicas)),
            draft="draft" if drafts else None,
            resolve=Finder(self.name, drafts, ordinal),
        )
        front = replace(self.options.front, max_num_seqs=self.running)
        return replace(self.options, decoder=decoder, front=front, addresses=replace(self.options.addresses, host=host))
