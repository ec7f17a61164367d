"""`outrider verify` on real services in the test's process: it passes an honest pair and catches planted errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from coordinator.app import build_app
from coordinator.config import DecoderConfig
from coordinator.decoder import Decoder
from coordinator.front import Front, FrontConfig
from outrider.planted import PLANTS
from outrider.verify import check, law, noise, search, stub_pair, texts
from outrider.verify.door import CannotJudge, Door
from tests.service.harness import ANSWER_WITHIN_S
from tests.service.stack import draft_service, target_service

PROMPTS = ("Hi, abc", "efg", "the end")
CHANCE = 1e-6
"""Of an honest pair's p-value below it: seldom enough for a test without seeds."""


@asynccontextmanager
async def http(folder: Path, *, draft: str | None = None, allow: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP door of the pair without weights, or of its target with another draft ("none": without)."""
    names = stub_pair.write(folder)
    async with target_service(names.target, allow_planted_errors=allow) as target_port:
        if draft == "none":
            async with _front(target_port, None, allow=allow) as client:
                yield client
        else:
            async with (
                draft_service(draft or names.draft, allow_planted_errors=allow) as draft_port,
                _front(target_port, draft_port, allow=allow) as client,
            ):
                yield client


@asynccontextmanager
async def _front(target_port: int, draft_port: int | None, *, allow: bool) -> AsyncIterator[httpx.AsyncClient]:
    draft = f"127.0.0.1:{draft_port}" if draft_port else None
    decoder = Decoder(DecoderConfig(target=(f"127.0.0.1:{target_port}",), draft=draft))
    front = Front(decoder, FrontConfig(max_speculative_tokens=8, allow_planted_errors=allow))
    await front.start()
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            while front.readiness.reason or (draft and decoder.state.draft is None):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        transport = httpx.ASGITransport(build_app(lambda: front))
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            yield client
    finally:
        await front.close()


async def test_an_honest_pair_passes(tmp_path: Path) -> None:
    """Guards the whole check, and against one that fails when all is right."""
    said: list[str] = []
    async with http(tmp_path) as client:
        report = await check.verify(Door(client), samples=160, say=said.append, prompts=PROMPTS, openings=("x", "a"))
        line = json.loads(report.to_json())
        assert (line["unexplained"], line["greedy_equal"], line["coupled_equal"]) == (0, [3, 3], [6, 6])
        assert line["law"]["p_value"] > CHANCE
        assert line["law"]["samples"] == 160
        assert line["drafted"] > 160
        assert said[-2].startswith(("opening 'x': ", "opening 'a': "))  # which of them, the dice decide
        assert await noise.band(Door(client), PROMPTS[:1], 2) == 0


async def test_every_planted_error_shows_in_the_law(tmp_path: Path) -> None:
    """Guards against a check that cannot fail; an honest pair beside them shows that it is not the samples."""
    async with http(tmp_path) as client:

        async def samples(plant: str | None, requests: int, *, speculate: bool) -> list[tuple[int, ...]]:
            door = Door(client, planted=plant)
            await door.deployment()
            wish = search.wish("x", speculate=speculate, n=16)
            return [text for reply in await door.all([wish] * requests) for text in reply.texts]

        plain = await samples(None, 120, speculate=False)
        assert law.compare(plain, await samples(None, 40, speculate=True)).p_value > CHANCE
        for plant in PLANTS:
            # Tokens dropped after a look move the law least: 640 answers miss them now and then.
            found = law.compare(plain, await samples(plant, 120 if plant == "drop-after-look" else 40, speculate=True))
            assert not found.equal, plant
        greedy = await texts.equality(Door(client, planted="row-shift"), texts.greedy(PROMPTS), 4)
        assert greedy.differences
        tie = await noise.look(Door(client), greedy.differences[0])
        assert tie.lead is not None
        assert tie.lead > 0
        assert not tie.within(0.0)


async def test_without_leave_or_draft_nothing_can_be_judged(tmp_path: Path) -> None:
    """Guards against a pass for a pair that never speculated, and against errors planted in production."""
    async with http(tmp_path, allow=False) as client:
        with pytest.raises(CannotJudge, match="--allow-planted-errors: coordinator, target, draft"):
            await check.verify(Door(client, planted="raw-q"), samples=100, say=lambda line: None)
    async with http(tmp_path, draft="none") as client:
        with pytest.raises(CannotJudge, match="no draft"):
            await check.verify(Door(client), samples=100, say=lambda line: None)
