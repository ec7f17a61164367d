"""Services of a sweep's own, on this machine, for as long as it lasts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from outrider.console import Downloads
from outrider.errors import InvalidArgument
from outrider.local.options import StackOptions
from outrider.local.stack import make_plan, private
from outrider.models import LOOKUP_DRAFTS


class Services(NamedTuple):
    """Where they are, what they are, and whether the draft has a device that someone pays for."""

    url: str
    description: dict[str, Any]
    has_draft_device: bool
    grpc: str = ""


@contextmanager
def own_services(
    options: StackOptions, say: Callable[[str], None], cpus: Mapping[str, tuple[int, ...]] | None = None
) -> Iterator[Services]:
    """A stack on free ports; it ends with the block.

    Args:
        cpus: cores by role, for services on the CPU; the plan's where a role is missing.

    Raises:
        OutriderError: as `outrider up` would say.
    """
    seats = tuple(
        replace(seat, cpus=cpus[seat.role]) if cpus and seat.role in cpus else seat for seat in make_plan(options)
    )
    draft = seats[1] if len(seats) > 1 else None
    with Downloads() as downloads, private(options, seats, downloads, say) as stack:
        description = {
            "target": seats[0].model,
            "target_place": seats[0].describe(),
            "draft": draft.model if draft else "none",
            "draft_place": draft.describe() if draft else None,
            "draft_shares_device": draft.shared if draft else None,
            "started_by": "this sweep",
        }
        paid = draft is not None and draft.model not in LOOKUP_DRAFTS and not draft.shared
        yield Services(stack.state.http, description, paid, stack.state.grpc)


def parse_cpus(field: str, text: str) -> tuple[int, ...]:
    """`0` or `0,1`.

    Raises:
        InvalidArgument: not cores that this process may use.
    """
    usable = os.sched_getaffinity(0)
    try:
        cores = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        cores = (-1,)
    if not set(cores) <= usable:
        raise InvalidArgument(field, f"{text!r} is not a list of usable cores; there are {sorted(usable)}")
    return cores
