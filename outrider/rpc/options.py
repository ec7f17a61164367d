"""Every transport constant, in one place for both ends: two modules that disagree about keepalive close connections."""

from __future__ import annotations

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
"""Protocol versions this build speaks; peers use the highest common one."""

RULE_VERSION = 1
"""Version of the acceptance rule and of what crosses the wire for it; peers must agree."""

NOISE_VERSION = 1
"""Version of the noise functions (`outrider.noise`); peers must agree."""

KEEPALIVE_TIME_MS = 5_000
KEEPALIVE_TIMEOUT_MS = 2_000
MIN_PING_INTERVAL_MS = 2_000
"""What a server tolerates; below the clients' `KEEPALIVE_TIME_MS`, or it answers with GOAWAY "too_many_pings"."""

RECONNECT_BACKOFF_INITIAL_MS = 100
RECONNECT_BACKOFF_MAX_MS = 1_000
CONNECT_TIMEOUT_MS = 2_000
"""gRPC's defaults (20 s, 120 s) keep a recovered service away for many seconds."""

MAX_CONNECTIONS = 1_024
HANDSHAKE_TIMEOUT_MS = 10_000
"""What a server bears: connections beyond the number are closed at once, and one that says nothing after this time,
so that idle ones do not keep the places for ever (gRPC's defaults: no limit, 120 s)."""

IDLE_BATCH_INTERVAL_S = 3.0
"""Either side of a link sends an empty batch when it has sent nothing for this long."""

LEASE_S = 10.0
"""How long a service keeps the streams of a link that ended."""

HEALTH_SERVICE = ""
"""The name under which a server answers health checks for itself as a whole."""

DRAFT_PORT = 50051
TARGET_PORT = 50052
COORDINATOR_PORT = 50050

DRAFT_SERVICE_NAME = "outrider.v1.DraftService"
TARGET_SERVICE_NAME = "outrider.v1.TargetService"
COORDINATOR_SERVICE_NAME = "outrider.v1.CoordinatorService"

Options = list[tuple[str, int | str]]

_LARGEST_MESSAGE = 2**31 - 1
_LONGEST_STREAM = 1 << 18
_LARGEST_VOCABULARY = 1 << 18
_ITEM_BYTES = 256
_OPEN_BYTES = 64 * 1024
_SLOT_BYTES = 32
_SUPPORT_BYTES = 6
_SUPPORT_IDS = 1_024


def credit(max_num_seqs: int) -> int:
    """Unanswered items that a service takes from one link: four steps' worth."""
    return 4 * max_num_seqs


def message_limit(
    *, max_num_seqs: int, max_model_len: int | None, max_slots: int, vocab_rows: int = _LARGEST_VOCABULARY
) -> int:
    """Bytes of the largest message that these limits allow, in either direction; the same on both ends.

    A link's whole credit may travel in one message. Dense rows dominate where they occur; they are bounded by one step
    rather than by the credit.

    Args:
        max_num_seqs: streams in one step of the service.
        max_model_len: tokens per stream; None where only the model will tell.
        max_slots: drafted slots per item.
        vocab_rows: rows of the model's output.
    """
    items = credit(max_num_seqs)
    prompts = items * ((max_model_len or _LONGEST_STREAM) * 4 + _ITEM_BYTES + _OPEN_BYTES)
    slots = items * max_slots * (_SLOT_BYTES + _SUPPORT_IDS * _SUPPORT_BYTES)
    dense = max_num_seqs * (max_slots + 1) * vocab_rows * 4
    return min(prompts + slots + dense, _LARGEST_MESSAGE)


def channel_options(limit: int = _LARGEST_MESSAGE) -> Options:
    """Options of every channel that this project opens.

    Args:
        limit: bytes of the largest message; `message_limit` of the peer's numbers once they are known.
    """
    return [
        *_common(limit),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_INITIAL_MS),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MAX_MS),
        # A restarted container has another address; gRPC's default asks for it again after 30 s only.
        ("grpc.dns_min_time_between_resolutions_ms", RECONNECT_BACKOFF_MAX_MS),
        # Addresses inside a cluster are never behind the proxy that http_proxy names.
        ("grpc.enable_http_proxy", 0),
        # Channels to one address must not share a connection: a link's flow control would hold up health checks.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(limit: int = _LARGEST_MESSAGE) -> Options:
    """Options of every server that this project starts; `limit` as in `channel_options`."""
    return [
        *_common(limit),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        # With port sharing a second server would start on the same port and take half of the calls.
        ("grpc.so_reuseport", 0),
    ]


def _common(limit: int) -> Options:
    return [
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
