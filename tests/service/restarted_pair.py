"""RestartedPair: a target and a draft whose services stop and start again while they are in use."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from outrider.models import LOOKUP_DRAFTS
from outrider.ports import free_port
from outrider.v1 import common_pb2, draft_pb2_grpc, target_pb2_grpc
from tests.service.harness import channel_to
from tests.service.stack import draft_service, target_service

SEATS = 16
TARGET_POOL, DRAFT_POOL = 448, 1024
"""Tokens in the KV pools, so few that streams lose their blocks to others."""
_FREE_WITHIN_S, _POLL_S = 30.0, 0.05
_STUBS = {"target": target_pb2_grpc.TargetServiceStub, "draft": draft_pb2_grpc.DraftServiceStub}


class RestartedPair:
    """Each part keeps its port over its restarts.

    Args:
        model: of the target.
        draft: the draft's model, or the name of a kind that looks up.

    Attributes:
        ports: by part.
        began, ended: restarts so far.
    """

    def __init__(self, model: str, draft: str) -> None:
        fields: dict[str, Any] = {"dtype": "float32", "max_num_seqs": SEATS, "max_slots": 32}
        room = {} if draft in LOOKUP_DRAFTS else {"kv_cache_tokens": DRAFT_POOL}
        self._fields = {
            "target": {"model": model, "kv_cache_tokens": TARGET_POOL, **fields},
            "draft": {"model": draft, **room, **fields},
        }
        self.ports = {part: free_port() for part in self._fields}
        self._running: dict[str, AsyncExitStack] = {}
        self.began = self.ended = 0

    async def start(self, part: str) -> None:
        """Returns when it serves."""
        service = target_service if part == "target" else draft_service
        self._running[part] = stack = AsyncExitStack()
        await stack.enter_async_context(service(port=self.ports[part], **self._fields[part]))

    async def again(self, part: str) -> None:
        """Stops a part without warning, and starts it again."""
        self.began += 1
        await self._running.pop(part).aclose()
        await self.start(part)
        self.ended += 1

    async def close(self) -> None:
        """Ends both."""
        for stack in self._running.values():
            await stack.aclose()

    async def used(self) -> dict[str, tuple[int, int]]:
        """Open streams and used blocks of both parts, as they say themselves."""
        found = {}
        for part, stub in _STUBS.items():
            async with channel_to(self.ports[part]) as channel:
                info = (await stub(channel).GetInfo(common_pb2.GetInfoRequest(), timeout=60)).info
            found[part] = (info.open_streams, info.kv_blocks_used)
        return found

    async def all_free(self) -> None:
        """Waits for the last closes, which are on their way; what is not free after a while is lost."""
        try:
            async with asyncio.timeout(_FREE_WITHIN_S):
                while any(any(held) for held in (await self.used()).values()):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return
