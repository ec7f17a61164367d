"""From a pair of model names to a running stack: resolve, plan, start, wait."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import httpx

from outrider import dummy, models, mtp
from outrider.errors import Unavailable
from outrider.fetch.cache import cache_root
from outrider.fetch.reporter import Reporter
from outrider.local import devices, layout
from outrider.local.options import StackOptions, is_dummy, scheme
from outrider.local.parts import address, free_ports, specs
from outrider.local.state import StackState, held, read, state_file
from outrider.local.supervisor import Supervisor
from outrider.planning import shape

_ATTACHED_WITHIN_S = 15.0
"""A draft is taken up within five seconds of its first good answer; a busy machine gets some more."""
_POLL_S = 0.1


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
    if is_dummy(options, name):
        size = shape.load(role, name, role)
        return layout.Footprint(int(size.weights_bytes), size.kv_bytes_per_token)
    found = models.describe(name, revision=revision, role=role)
    dtype = options.dtype if role == "target" else options.draft_dtype or options.dtype
    return layout.footprint(found.config, found.weight_bytes, dtype)


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
        ports = free_ports(options, with_draft=len(seats) > 1)
        resolved = [
            dummy.resolve(seat.model, role)
            if is_dummy(options, seat.model)
            else models.resolve(seat.model, revision=revision, role=role, reporter=reporter)
            for seat, revision, role in zip(seats, (options.revision, options.draft_revision), _ROLES, strict=False)
        ]
        logs = cache / "logs" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
        supervisor = Supervisor(specs(options, seats, resolved, ports), logs, say)
        cleanup.callback(supervisor.kill)
        supervisor.wait_ready(options.start_timeout_s)
        state = StackState(
            pid=os.getpid(),
            http=f"{scheme(options)}://{address(options.host, ports.http)}",
            grpc=address(options.host, ports.generate),
            target=address("127.0.0.1", ports.target),
            draft=address("127.0.0.1", ports.draft) if len(seats) > 1 else None,
            model=options.served_model_name or resolved[0].model_id,
            logs=str(logs),
            parts=supervisor.process_ids,
            certfile=options.tls.certfile,
            keyfile=options.tls.keyfile,
        )
        yield Stack(state, supervisor)


_ROLES: tuple[models.Role, models.Role] = ("target", "draft")


def running_state() -> StackState:
    """The state of this user's running stack.

    Raises:
        Unavailable: none runs.
    """
    state = read(state_file(cache_root()))
    if state is None:
        raise Unavailable("no stack is running; start one with `outrider up`")
    return state
