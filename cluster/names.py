"""What things are called on a cluster, and how a coordinator finds a service by its name.

All actors live in one namespace of their own, below the name of their application, so that Outrider finds what is its
own and nothing else.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayError

from outrider.errors import Unavailable

NAMESPACE = "outrider"
_ANSWER_S = 1.0


def keeper(application: str) -> str:
    """Of the keeper's actor."""
    return f"{application}/keeper"


def service(application: str, role: str, index: int) -> str:
    """Of a service's actor."""
    return f"{application}/{role}/{index}"


def group(application: str, role: str) -> str:
    """Of the placement group of all replicas of a role; groups have no namespace that outlives their creator's."""
    return f"{NAMESPACE}/{application}/{role}"


def find(name: str) -> Any | None:
    """Handle of a live actor of ours, or None; blocks on Ray's control store."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def existing(application: str) -> list[str]:
    """Names of the application's live actors."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        actor["name"]
        for actor in actors
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(f"{application}/")
    )


class Finder:
    """`coordinator.config.Resolve` for one coordinator: from `target/1` or `draft` to an address.

    A coordinator speaks to one draft at a time. Coordinators begin with different replicas, and one whose draft is away
    takes the next replica that answers.
    """

    def __init__(self, application: str, drafts: int, first_draft: int) -> None:
        """
        Args:
            application: whose services.
            drafts: draft replicas.
            first_draft: which of them to ask first; any number, taken modulo `drafts`.
        """
        self._application = application
        self._drafts = drafts
        self._first_draft = first_draft
        self._handles: dict[str, Any] = {}

    async def __call__(self, name: str) -> str:
        """
        Raises:
            Unavailable: the service is starting, or its node is gone.
        """
        if name != "draft":
            role, index = name.split("/")
            return await self._address(role, int(index))
        reasons = []
        for offset in range(self._drafts):
            try:
                return await self._address("draft", (self._first_draft + offset) % self._drafts)
            except Unavailable as error:
                reasons.append(str(error))
        raise Unavailable("; ".join(reasons))

    async def _address(self, role: str, index: int) -> str:
        name = service(self._application, role, index)
        try:
            if name not in self._handles:
                handle = await asyncio.to_thread(find, name)
                if handle is None:
                    raise Unavailable(f"there is no actor {name}")
                self._handles[name] = handle
            async with asyncio.timeout(_ANSWER_S):
                address = await self._handles[name].address.remote()
        except (RayError, TimeoutError) as error:
            # A killed actor's handle is of no more use; a restarted one's is, but asking again costs little.
            self._handles.pop(name, None)
            raise Unavailable(f"{name} does not answer ({type(error).__name__})") from None
        if not address:
            raise Unavailable(f"{name} has not begun to listen")
        return str(address)
