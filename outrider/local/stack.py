"""From a pair of model names to a running stack: resolve, plan, start, wait."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import models
from outrider.errors import InvalidArgument, Unavailable
from outrider.fetch.cache import cache_root
from outrider.fetch.reporter import Reporter
from outrider.local import devices, layout
from outrider.local.state import StackState, held, read, state_file
from outrider.local.supervisor import PartSpec, Supervisor
from outrider.rpc.options import COORDINATOR_PORT, DRAFT_PORT, TARGET_PORT

HTTP_PORT = 8000
_ASK_TIMEOUT_S = 0.5
"""How long a part may take to say whether it serves; it is asked again soon, and the progress must not stand still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What `outrider up` takes; ports of 0 are chosen freely.

    Attributes:
        draft: model name, "ngram", or "none" to serve without speculation.
        target_device, draft_device: nvidia-smi numbers, UUIDs, "cpu" or "auto".
        num_speculative_tokens: "auto" or a number of drafted tokens per round.
        start_timeout_s: seconds after which parts that do not serve yet are given up.
    """

    target: str = "default"
    draft: str = "default"
    target_device: str = "auto"
    draft_device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = HTTP_PORT
    grpc_port: int = COORDINATOR_PORT
    draft_port: int = DRAFT_PORT
    target_port: int = TARGET_PORT
    num_speculative_tokens: str = "auto"
    rejection_sample_method: str = "auto"
    revision: str | None = None
    draft_revision: str | None = None
    allow_vocab_mismatch: bool = False
    start_timeout_s: float = 1800.0


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
    target = models.describe(options.target, revision=options.revision)
    draft_name = models.canonical(options.draft, "draft")
    draft = None if draft_name == "none" else models.describe(draft_name, revision=options.draft_revision, role="draft")
    return layout.plan(
        target=models.canonical(options.target, "target"),
        target_footprint=layout.footprint(target.config, target.weight_bytes, options.dtype),
        draft=None if draft is None else draft_name,
        draft_footprint=layout.footprint(draft.config, draft.weight_bytes, options.dtype)
        if draft
        else layout.Footprint(),
        target_device=options.target_device,
        draft_device=options.draft_device,
        available=devices.cards(),
        cpu_free_bytes=layout.cpu_free_bytes(),
        cores=len(os.sched_getaffinity(0)),
    )


@contextlib.contextmanager
def running(
    options: StackOptions,
    seats: tuple[layout.Seat, ...],
    reporter: Reporter,
    say: Callable[[str], None],
    *,
    exclusive: bool,
) -> Iterator[Stack]:
    """The stack, for as long as the block lasts; everything it started ends with it.

    Args:
        exclusive: whether it is *the* stack of this user, which `generate`, `status` and `down` talk to.

    Raises:
        InvalidArgument: a port is taken.
        ModelUnavailable: a model could not be had.
        Unavailable: a part died or did not become ready; or another exclusive stack runs.
    """
    cache = cache_root()
    with contextlib.ExitStack() as cleanup:
        holder = cleanup.enter_context(held(state_file(cache))) if exclusive else None
        ports = _ports(options, with_draft=len(seats) > 1)
        resolved = [
            models.resolve(seat.model, revision=revision, role=role, reporter=reporter)
            for seat, revision, role in zip(seats, (options.revision, options.draft_revision), _ROLES, strict=False)
        ]
        logs = cache / "logs" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
        supervisor = Supervisor(_specs(options, seats, resolved, ports), logs, say)
        cleanup.callback(supervisor.kill)
        supervisor.wait_ready(options.start_timeout_s)
        state = StackState(
            pid=os.getpid(),
            http=f"http://{_address(options.host, ports.http)}",
            grpc=_address(options.host, ports.generate),
            target=_address("127.0.0.1", ports.target),
            draft=_address("127.0.0.1", ports.draft) if len(seats) > 1 else None,
            model=options.served_model_name or resolved[0].model_id,
            logs=str(logs),
            parts=supervisor.process_ids,
        )
        if holder:
            holder.write(state)
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
            probe.bind((host, port))
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
        arguments = ["--model", model.path, "--host", "127.0.0.1", "--port", str(port)]
        if model.folder is not None or seat.role == "target":
            arguments += ["--device", seat.device, "--dtype", options.dtype]
            arguments += ["--model-id", model.model_id, "--revision", model.revision] if model.folder else []
        if seat.role == "draft" and model.folder is not None and resolved[0].folder is not None:
            arguments += ["--embeddings", resolved[0].path]  # of use to heads that share the target's
        if options.max_model_len is not None:
            arguments += ["--max-model-len", str(options.max_model_len)]
        if seat.cpus is not None:
            arguments += ["--threads", str(len(seat.cpus))]
        specs.append(
            PartSpec(
                role=seat.role,
                module=f"{seat.role}_service",
                arguments=tuple(arguments),
                ready=_service_ready(_address("127.0.0.1", port)),
                environment=_visible(seat),
                cpus=seat.cpus,
            )
        )
    coordinator = ["--target", _address("127.0.0.1", ports.target)]
    coordinator += ["--draft", _address("127.0.0.1", ports.draft)] if len(seats) > 1 else []
    coordinator += ["--host", options.host, "--port", str(ports.http), "--grpc-port", str(ports.generate)]
    coordinator += ["--served-model-name", options.served_model_name or resolved[0].model_id]
    coordinator += ["--num-speculative-tokens", options.num_speculative_tokens]
    coordinator += ["--rejection-sample-method", options.rejection_sample_method]
    coordinator += ["--allow-vocab-mismatch"] if options.allow_vocab_mismatch else []
    front = f"http://{_address('127.0.0.1' if options.host in ('0.0.0.0', '::') else options.host, ports.http)}"
    specs.append(PartSpec("coordinator", "coordinator", tuple(coordinator), _http_ready(front)))
    return specs


def _visible(seat: layout.Seat) -> dict[str, str]:
    """A service sees its own cards only, by UUID, so that no other layer's numbering can move it."""
    visible = "" if seat.cards is None else ",".join(card.uuid for card in seat.cards)
    return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _service_ready(address: str) -> Callable[[], bool]:
    def ready() -> bool:
        with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=_ASK_TIMEOUT_S)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return ready


def _http_ready(front: str) -> Callable[[], bool]:
    def ready() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{front}/ready", timeout=2 * _ASK_TIMEOUT_S, trust_env=False).status_code == 200
        return False

    return ready


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
