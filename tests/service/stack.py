"""A whole pair in the test's process: real services with their engine threads, real gRPC, a Decoder between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from coordinator.decoder import Decoder, DecoderConfig, DecodingRequest, StreamStats
from draft_service.config import DraftConfig
from draft_service.service import DraftService
from outrider.models import LOOKUP_DRAFTS
from outrider.sampling import SamplingParams
from target_service.config import TargetConfig
from target_service.service import TargetService
from tests.service.harness import ANSWER_WITHIN_S

LOAD_WITHIN_S = 300.0
"""How long a service may take to load and probe its model; far above what a loaded machine needs."""


class Answer(NamedTuple):
    """What a stream gave."""

    tokens: list[int]
    drafted: list[bool]
    finish_reason: str | None
    stats: StreamStats


@asynccontextmanager
async def target_service(model: str, *, port: int = 0, **fields: Any) -> AsyncIterator[int]:
    """A target service that is ready; yields its port."""
    service = TargetService(
        TargetConfig(model=model, port=port, **{"threads": 1, "kv_cache_tokens": 65_536, "profile_seconds": 0} | fields)
    )
    bound = await service.start()
    try:
        await asyncio.wait_for(service.ready(), LOAD_WITHIN_S)
        yield bound
    finally:
        await service.stop()


@asynccontextmanager
async def draft_service(model: str, *, port: int = 0, **fields: Any) -> AsyncIterator[int]:
    """A draft service that is ready; yields its port."""
    engine = {} if model in LOOKUP_DRAFTS else {"threads": 1, "kv_cache_tokens": 65_536, "profile_seconds": 0}
    service = DraftService(DraftConfig(model=model, port=port, **engine | fields))
    bound = await service.start()
    try:
        await asyncio.wait_for(service.ready(), LOAD_WITHIN_S)
        yield bound
    finally:
        await service.stop()


def config(target: int | Sequence[int], draft: int | None = None, **fields: Any) -> DecoderConfig:
    """Of a decoder for the services on these ports."""
    targets = (target,) if isinstance(target, int) else target
    return DecoderConfig(
        target=tuple(f"127.0.0.1:{port}" for port in targets),
        draft=f"127.0.0.1:{draft}" if draft is not None else None,
        **fields,
    )


@asynccontextmanager
async def decoder(target: int | Sequence[int], draft: int | None = None, **fields: Any) -> AsyncIterator[Decoder]:
    """A decoder that is attached to the services on these ports."""
    targets = (target,) if isinstance(target, int) else target
    made = Decoder(config(targets, draft, **fields))
    await made.start()
    try:
        await until(lambda: made.state.targets_up == len(targets) and (draft is None or made.state.draft is not None))
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def pair(target: str, draft: str | None, **fields: Any) -> AsyncIterator[Decoder]:
    """A decoder with services of these models."""
    async with target_service(target) as target_port:
        if draft is None:
            async with decoder(target_port, **fields) as made:
                yield made
        else:
            async with draft_service(draft) as draft_port, decoder(target_port, draft_port, **fields) as made:
                yield made


async def until(condition: Callable[[], bool], within_s: float = ANSWER_WITHIN_S) -> None:
    """Waits for something that happens by itself; fails if it does not."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def request(prompt: Sequence[int], max_tokens: int = 64, *, gamma: int | None = None, **fields: Any) -> DecodingRequest:
    """A request; sampling parameters among the fields go where they belong."""
    own = {name: fields.pop(name) for name in list(fields) if name in DecodingRequest.__dataclass_fields__}
    params = SamplingParams(max_tokens=max_tokens, **fields)
    return DecodingRequest(prompt_ids=tuple(prompt), params=params, num_speculative_tokens=gamma, **own)


async def answer(made: Decoder, wanted: DecodingRequest) -> Answer:
    """Reads a stream to its end."""
    stream = made.open(wanted)
    tokens: list[int] = []
    drafted: list[bool] = []
    reason = None
    async for emission in stream:
        tokens += emission.tokens
        drafted += emission.drafted
        reason = emission.finish_reason
    return Answer(tokens, drafted, reason, stream.stats)


async def answers(made: Decoder, wanted: Sequence[DecodingRequest]) -> list[Answer]:
    """Reads many streams at once."""
    return list(await asyncio.gather(*(answer(made, one) for one in wanted)))
