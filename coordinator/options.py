"""Options: everything the operator of a coordinator decides."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.config import DecoderConfig
from coordinator.front import FrontConfig
from outrider.log_format import TEXT
from outrider.rpc.credentials import PLAIN, TlsFiles
from outrider.rpc.exposure import is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where the doors are; port 0 takes a free one.

    Attributes:
        tls: files of both doors; without a certificate they are plain text.
        http_host: where the plain HTTP door listens if not at `host`, because a gate with TLS stands before it.
    """

    host: str
    port: int
    grpc_port: int
    tls: TlsFiles = PLAIN
    http_host: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything the operator decides.

    Attributes:
        drain_timeout_s: how long running answers may go on after SIGTERM.
        log_level: of this process and its replica.
        log_format: text, or json: one object per line.
        otlp_endpoint: of the collector that gets traces, or None.
        trace_sample_rate: share of the requests without a trace context of their own that are traced.
    """

    decoder: DecoderConfig
    front: FrontConfig
    addresses: Addresses
    drain_timeout_s: float
    log_level: str
    log_format: str = TEXT
    otlp_endpoint: str | None = None
    trace_sample_rate: float = 0.0

    @property
    def grace_s(self) -> float:
        """Seconds that Serve leaves to a coordinator that is to go: no answer that may still run is cut off by it."""
        return max(self.drain_timeout_s, self.front.policy.request_timeout_s)


def open_to_strangers(options: Options) -> bool:
    """Whether others than this machine reach the doors, and none of them is asked for a key or a certificate."""
    doors, keys = options.addresses, options.front.api_keys
    return not (is_loopback(doors.host) or doors.tls.ca_certs or keys.of_file or keys.fixed)


def url(addresses: Addresses) -> str:
    """Where the API is."""
    host = f"[{addresses.host}]" if ":" in addresses.host else addresses.host
    return f"{'https' if addresses.tls.certfile else 'http'}://{host}:{addresses.port}/v1"
