"""The parts of a stack as processes: their ports, their command lines, and how each says that it serves."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from outrider import api_key, dummy, models
from outrider.certs.names import authority
from outrider.errors import InvalidArgument
from outrider.health import ask
from outrider.local import layout
from outrider.local.options import StackOptions, is_dummy, scheme
from outrider.local.supervisor import PartSpec
from outrider.ports import free_port
from outrider.rpc.credentials import TlsFiles, own_door

_ASK_TIMEOUT_S = 0.5
"""How long a part may take to say whether it serves; it is asked again soon, and the progress must not stand still."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a stack's parts listen; `draft` is 0 without one."""

    http: int
    generate: int
    target: int
    draft: int


def free_ports(options: StackOptions, *, with_draft: bool) -> Ports:
    """Those that the options name, or free ones.

    Raises:
        InvalidArgument: one is taken.
    """
    return Ports(
        _free_port("port", options.host, options.port),
        _free_port("grpc-port", options.host, options.grpc_port),
        _free_port("target-port", "127.0.0.1", options.target_port),
        _free_port("draft-port", "127.0.0.1", options.draft_port) if with_draft else 0,
    )


def _free_port(field: str, host: str, port: int) -> int:
    """`port` if nothing listens on it, or any free one for 0.

    Raises:
        InvalidArgument: taken; the message names field and port.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port or free_port(host)))
        except OSError as error:
            raise InvalidArgument(
                field, f"{address(host, port)} cannot be taken ({error.strerror}); choose another with --{field}"
            ) from None
        return int(probe.getsockname()[1])


def specs(
    options: StackOptions, seats: tuple[layout.Seat, ...], resolved: list[models.ResolvedModel], ports: Ports
) -> list[PartSpec]:
    """Services in the order of their seats, then the coordinator."""
    found = []
    for seat, model in zip(seats, resolved, strict=True):
        port = ports.target if seat.role == "target" else ports.draft
        arguments = [*_config(options), "--model", model.path, "--host", "127.0.0.1", "--port", str(port)]
        dtype = options.dtype if seat.role == "target" else options.draft_dtype or options.dtype
        if model.folder is not None or seat.role == "target":
            arguments += ["--device", seat.device, "--dtype", dtype]
            arguments += ["--model-id", model.model_id, "--revision", model.revision] if model.folder else []
        if options.profile_seconds is not None:
            arguments += ["--profile-seconds", str(options.profile_seconds)]
        if is_dummy(options, seat.model):
            arguments += ["--load-format", dummy.LOAD_FORMAT]
        if seat.role == "draft" and model.folder is not None and resolved[0].folder is not None:
            arguments += ["--embeddings", resolved[0].path]  # of use to heads that share the target's
        if options.max_model_len is not None:
            arguments += ["--max-model-len", str(options.max_model_len)]
        arguments += ["--allow-planted-errors"] if options.allow_planted_errors else []
        if seat.cpus is not None:
            arguments += ["--threads", str(len(seat.cpus))]
        found.append(
            PartSpec(
                role=seat.role,
                module=f"{seat.role}_service",
                arguments=tuple(arguments),
                ready=_service_ready(address("127.0.0.1", port), options.links, authority(seat.role)),
                environment=_visible(seat),
                cpus=seat.cpus,
            )
        )
    coordinator = [*_config(options), "--target", address("127.0.0.1", ports.target)]
    coordinator += ["--draft", address("127.0.0.1", ports.draft) if len(seats) > 1 else "none"]
    coordinator += ["--host", options.host, "--port", str(ports.http), "--grpc-port", str(ports.generate)]
    coordinator += ["--served-model-name", options.served_model_name or resolved[0].model_id]
    coordinator += ["--num-speculative-tokens", options.num_speculative_tokens]
    coordinator += ["--schedule", str(options.schedule.resolve())] if options.schedule is not None else []
    coordinator += ["--rejection-sample-method", options.rejection_sample_method]
    coordinator += ["--allow-vocab-mismatch"] if options.allow_vocab_mismatch else []
    coordinator += ["--allow-planted-errors"] if options.allow_planted_errors else []
    for flag, path in (
        ("--ssl-certfile", options.tls.certfile),
        ("--ssl-keyfile", options.tls.keyfile),
        ("--ssl-ca-certs", options.tls.ca_certs),
        ("--api-key-file", options.api_key_file),
    ):
        coordinator += [flag, path] if path else []
    coordinator += ["--insecure"] if options.insecure else []
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    front = f"{scheme(options)}://{address(host, ports.http)}"
    found.append(PartSpec("coordinator", "coordinator", tuple(coordinator), _http_ready(front, options.tls)))
    return found


def _visible(seat: layout.Seat) -> dict[str, str]:
    """A service sees its own cards only, by UUID, so that no other layer can move it; and no API key."""
    visible = "" if seat.cards is None else ",".join(card.uuid for card in seat.cards)
    return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", api_key.VARIABLE: ""}


def _service_ready(at: str, tls: TlsFiles, name: str) -> Callable[[], bool]:
    return lambda: ask(at, _ASK_TIMEOUT_S, tls, name).serving


def _http_ready(front: str, tls: TlsFiles) -> Callable[[], bool]:
    verify = own_door(tls.certfile, tls.keyfile) if tls.certfile and tls.keyfile else True

    def ready() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"{front}/ready", timeout=2 * _ASK_TIMEOUT_S, trust_env=False, verify=verify)
            return answer.status_code == 200
        return False

    return ready


def _config(options: StackOptions) -> list[str]:
    return [] if options.config is None else ["--config", options.config]


def address(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
