"""The end of an application, and of nothing else."""

from __future__ import annotations

import time

import ray
from ray import serve

from cluster import names, placement
from outrider.errors import InvalidArgument, Unavailable

_GONE_WITHIN_S = 60.0
_POLL_S = 0.5


def remove(name: str) -> None:
    """End an application of Outrider's and all that belongs to it; Serve and its other applications stay.

    Raises:
        Unavailable: there is none of that name.
        InvalidArgument: the name is that of somebody else's application.
    """
    if not names.existing(name):
        if name in serve.status().applications:
            raise InvalidArgument("name", f"the Serve application {name!r} is not Outrider's; it is left alone")
        raise Unavailable(f"Outrider has no application {name!r} on this cluster")
    remove_own(name)


def remove_own(name: str) -> None:
    """End whatever there is of an application of Outrider's."""
    try:
        if name in serve.status().applications:
            serve.delete(name)
    finally:
        # The keeper first: it would start the services again.
        for actor in sorted(names.existing(name), key=lambda actor: actor != names.keeper(name)):
            if (handle := names.find(actor)) is not None:
                ray.kill(handle, no_restart=True)
        placement.remove_groups(name)
    end = time.monotonic() + _GONE_WITHIN_S
    while names.existing(name) and time.monotonic() < end:
        time.sleep(_POLL_S)
