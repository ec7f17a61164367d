"""From a pair of model names to a running stack: resolve, plan, start, wait."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from outrider import api_key, dummy, models, mtp
from outrider.certs.names import authority
from outrider.errors import InvalidArgument, Unavailable
from outrider.fetch.cache import cache_root
from outrider.fetch.reporter import Reporter
from outrider.health import ask
from outrider.local import devices, layout
from outrider.local.state import StackState, held, read, state_file
from outrider.local.supervisor import PartSpec, Supervisor
from outrider.planning import shape
from outrider.ports import free_port
from outrider.rpc.credentials import PLAIN, TlsFiles, own_door
from outrider.rpc.exposure import guard
from outrider.rpc.options import COORDINATOR_PORT, DRAFT_PORT, TARGET_PORT

HTTP_PORT = 8000
_ATTACHED_WITHIN_S = 15.0
"""A draft is taken up within five seconds of its first good answer; a busy machine gets some more."""
_POLL_S = 0.1
_ASK_TIMEOUT_S = 0.5
"""How long a part may take to say whether it serves; it is asked again soon, and the progress must not stand still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What `outrider up` takes; ports of 0 are chosen freely.

    Attributes:
        draft: model name, "mtp" (the target's own MTP layer), "ngram", "suffix", or "none" for no speculation.
        target_device, draft_device: nvidia-smi numbers, UUIDs, "cpu" or "auto".
        dtype, draft_dtype: number formats; an unset draft_dtype means the target's.
        config: file whose further settings the parts read themselves.
        num_speculative_tokens: "auto" or a number of drafted tokens per round.
        schedule: file with drafted tokens by batch size, as `outrider bench sweep` writes it, or None.
        allow_planted_errors: whether requests may ask for errors on purpose, to test `outrider verify`.
        load_format: "dummy" measures shapes without weights: `config.json` alone, random weights.
        tls: files of the API's TLS; without a certificate it is plain text.
        links: files of the coordinator's TLS towards the services, whose own are in `config`.
        insecure: whether plain text is meant although `host` is not loopback.
        api_key_file: with the keys that clients must show; one more may stand in the environment (`outrider.api_key`).
        profile_seconds: what each service spends on measuring its steps while idle; None leaves it to the services.
        start_timeout_s: seconds after which parts that do not serve yet are given up.
    """

    target: str = "default"
    draft: str = "default"
    target_device: str = "auto"
    draft_device: str = "auto"
    dtype: str = "auto"
    draft_dtype: str | None = None
    config: str | None = None
    max_model_len: int | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = HTTP_PORT
    grpc_port: int = COORDINATOR_PORT
    draft_port: int = DRAFT_PORT
    target_port: int = TARGET_PORT
    num_speculative_tokens: str = "auto"
    schedule: Path | None = None
    load_format: str = "auto"
    profile_seconds: float | None = None
    rejection_sample_method: str = "auto"
    revision: str | None = None
    draft_revision: str | None = None
    allow_vocab_mismatch: bool = False
    allow_planted_errors: bool = False
    tls: TlsFiles = PLAIN
    links: TlsFiles = PLAIN
    insecure: bool = False
    api_key_file: str | None = None
    start_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        encrypted = self.tls.certfile is not None
        remedy = "ssl_certfile and ssl_keyfile"
        guard("host", self.host, encrypted=encrypted, insecure=self.insecure, remedy=remedy)
        self.tls.check()


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack that serves."""

    state: StackState
    supervisor: Supervisor


def make_plan(options: StackOptions) -> tuple[layout.Seat, ...]:
    """Seats for the pair, from configurations alone: nothing is downloaded.

    Raises:
        DoesNotFit, InvalidArgument, ModelUnavailable: one line each.
    """
    target = models.canonical(options.target, "target")
    draft = mtp.of_target(models.canonical(options.draft, "draft"), target)
    return layout.plan(
        target=target,
        target_footprint=_footprint(options, target, "target", options.revision),
        draft=None if draft == "none" else draft,
        draft_footprint=layout.Footprint()
        if draft == "none"
        else _footprint(options, draft, "draft", options.draft_revision),
        target_device=options.target_device,
        draft_device=options.draft_device,
        available=devices.cards(),
        cpu_free_bytes=layout.cpu_free_bytes(),
        cores=len(os.sched_getaffinity(0)),
    )


def _footprint(options: StackOptions, name: str, role: models.Role, revision: str | None) -> layout.Footprint:
    if _is_dummy(options, name):
        size = shape.load(role, name, role)
        return layout.Footprint(int(size.weights_bytes), size.kv_bytes_per_token)
    found = models.describe(name, revision=revision, role=role)
    dtype = options.dtype if role == "target" else options.draft_dtype or options.dtype
    return layout.footprint(found.config, found.weight_bytes, dtype)


def _is_dummy(options: StackOptions, name: str) -> bool:
    return options.load_format == dummy.LOAD_FORMAT and not _has_no_weights(name)


def _has_no_weights(name: str) -> bool:
    return name.startswith(models.STUB_PREFIX) or name in models.LOOKUP_DRAFTS


@contextlib.contextmanager
def running(
    options: StackOptions, seats: tuple[layout.Seat, ...], reporter: Reporter, say: Callable[[str], None]
) -> Iterator[Stack]:
    """*The* stack of this user, which `generate`, `status` and `down` talk to, for as long as the block lasts.

    Raises:
        InvalidArgument: a port is taken.
        ModelUnavailable: a model could not be had.
        Unavailable: a part died or did not become ready; or such a stack runs already.
    """
    with held(state_file(cache_root())) as holder, _started(options, seats, reporter, say) as stack:
        holder.write(stack.state)
        yield stack


@contextlib.contextmanager
def private(
    options: StackOptions, seats: tuple[layout.Seat, ...], reporter: Reporter, say: Callable[[str], None]
) -> Iterator[Stack]:
    """A stack for whoever wants to see the pair at work, beside any other: on free ports, with its draft attached.

    A coordinator is ready without a draft, and compares vocabularies before it takes one up.

    Raises:
        ModelUnavailable: a model could not be had.
        Unavailable: a part died or did not become ready.
    """
    free = replace(options, port=0, grpc_port=0, draft_port=0, target_port=0)
    with _started(free, seats, reporter, say) as stack:
        if stack.state.draft and not _attached(stack.state.http, _ATTACHED_WITHIN_S):
            say(f"the draft is not attached after {_ATTACHED_WITHIN_S:g} s; see {stack.state.http}/ready")
        yield stack


def _attached(url: str, within_s: float) -> bool:
    """Whether the coordinator has taken a draft up before the time is over."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        if httpx.get(f"{url}/ready", timeout=within_s, trust_env=False).json().get("draft") is not None:
            return True
        time.sleep(_POLL_S)
    return False


@contextlib.contextmanager
def _started(
    options: StackOptions, seats: tuple[layout.Seat, ...], reporter: Reporter, say: Callable[[str], None]
) -> Iterator[Stack]:
    """The parts, ready to serve; everything that was started ends with the block."""
    cache = cache_root()
    with contextlib.ExitStack() as cleanup:
        ports = _ports(options, with_draft=len(seats) > 1)
        resolved = [
            dummy.resolve(seat.model, role)
            if _is_dummy(options, seat.model)
            else models.resolve(seat.model, revision=revision, role=role, reporter=reporter)
            for seat, revision, role in zip(seats, (options.revision, options.draft_revision), _ROLES, strict=False)
        ]
        logs = cache / "logs" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
        supervisor = Supervisor(_specs(options, seats, resolved, ports), logs, say)
        cleanup.callback(supervisor.kill)
        supervisor.wait_ready(options.start_timeout_s)
        state = StackState(
            pid=os.getpid(),
            http=f"{_scheme(options)}://{_address(options.host, ports.http)}",
            grpc=_address(options.host, ports.generate),
            target=_address("127.0.0.1", ports.target),
            draft=_address("127.0.0.1", ports.draft) if len(seats) > 1 else None,
            model=options.served_model_name or resolved[0].model_id,
            logs=str(logs),
            parts=supervisor.process_ids,
            certfile=options.tls.certfile,
            keyfile=options.tls.keyfile,
        )
        yield Stack(state, supervisor)


_ROLES: tuple[models.Role, models.Role] = ("target", "draft")


@dataclass(frozen=True, slots=True)
class _Ports:
    http: int
    generate: int
    target: int
    draft: int


def _ports(options: StackOptions, *, with_draft: bool) -> _Ports:
    return _Ports(
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
                field, f"{_address(host, port)} cannot be taken ({error.strerror}); choose another with --{field}"
            ) from None
        return int(probe.getsockname()[1])


def _specs(
    options: StackOptions, seats: tuple[layout.Seat, ...], resolved: list[models.ResolvedModel], ports: _Ports
) -> list[PartSpec]:
    specs = []
    for seat, model in zip(seats, resolved, strict=True):
        port = ports.target if seat.role == "target" else ports.draft
        arguments = [*_config(options), "--model", model.path, "--host", "127.0.0.1", "--port", str(port)]
        dtype = options.dtype if seat.role == "target" else options.draft_dtype or options.dtype
        if model.folder is not None or seat.role == "target":
            arguments += ["--device", seat.device, "--dtype", dtype]
            arguments += ["--model-id", model.model_id, "--revision", model.revision] if model.folder else []
        if options.profile_seconds is not None:
            arguments += ["--profile-seconds", str(options.profile_seconds)]
        if _is_dummy(options, seat.model):
            arguments += ["--load-format", dummy.LOAD_FORMAT]
        if seat.role == "draft" and model.folder is not None and resolved[0].folder is not None:
            arguments += ["--embeddings", resolved[0].path]  # of use to heads that share the target's
        if options.max_model_len is not None:
            arguments += ["--max-model-len", str(options.max_model_len)]
        arguments += ["--allow-planted-errors"] if options.allow_planted_errors else []
        if seat.cpus is not None:
            arguments += ["--threads", str(len(seat.cpus))]
        specs.append(
            PartSpec(
                role=seat.role,
                module=f"{seat.role}_service",
                arguments=tuple(arguments),
                ready=_service_ready(_address("127.0.0.1", port), options.links, authority(seat.role)),
                environment=_visible(seat),
                cpus=seat.cpus,
            )
        )
    coordinator = [*_config(options), "--target", _address("127.0.0.1", ports.target)]
    coordinator += ["--draft", _address("127.0.0.1", ports.draft) if len(seats) > 1 else "none"]
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
    front = f"{_scheme(options)}://{_address(host, ports.http)}"
    specs.append(PartSpec("coordinator", "coordinator", tuple(coordinator), _http_ready(front, options.tls)))
    return specs


def _visible(seat: layout.Seat) -> dict[str, str]:
    """A service sees its own cards only, by UUID, so that no other layer can move it; and no API key."""
    visible = "" if seat.cards is None else ",".join(card.uuid for card in seat.cards)
    return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", api_key.VARIABLE: ""}


def _service_ready(address: str, tls: TlsFiles, name: str) -> Callable[[], bool]:
    return lambda: ask(address, _ASK_TIMEOUT_S, tls, name).serving


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


def _scheme(options: StackOptions) -> str:
    return "http" if options.tls.certfile is None else "https"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def running_state() -> StackState:
    """The state of this user's running stack.

    Raises:
        Unavailable: none runs.
    """
    state = read(state_file(cache_root()))
    if state is None:
        raise Unavailable("no stack is running; start one with `outrider up`")
    return state
