"""A seed names one text: the coupled rule, whatever gamma, neighbours and the fate of the draft.

Each of `--coupled-requests` requests has a prompt, a seed and sampling values of its own, and is answered plainly, with
gamma 1, 4 and auto beside fifteen others, with gamma 4 alone, and while the draft is killed. The ids have to be those
of the plain answer: in float64 on a tiny random model, which is its own draft, and in the served number format on the
default model with its default draft.

A slow machine takes more than an hour for 200 of those on the default model. So there the requests come in waves, each
of which goes through everything, and none begins after `--coupled-minutes`; the last line printed says how many there
were.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from coordinator.decoder import Decoder, DecodingRequest
from outrider.noise import U32, U64, gumbel_row_keys
from outrider.sampling import Rule
from outrider.seam import Timings
from tests.e2e.processes import service
from tests.model.conftest import KV_TOKENS
from tests.service.stack import answer, decoder, draft_service, request, target_service
from tests.unit.tiny import EOS, tiny_llama

pytestmark = [pytest.mark.model, pytest.mark.timeout(1_800)]

BESIDE = 16
TOKENS = 24
FEWER_TOKENS = 16
SHORTER = 60
"""Of answers and prompts on the default model."""
WAVE = 16
"""Requests of the default model that go through everything before the next ones begin."""
ALONE = 8
"""Each so manieth request is decoded alone, too: one at a time is what takes longest."""
DRAFTED_BEFORE_DEATH = 4
"""Messages that the draft answers before it is killed."""

Texts = list[list[int]]


class Checked(NamedTuple):
    """Plain texts, and what drafts did beside them.

    Attributes:
        least_drafts: rounds with a proposal under gamma 1 or 4, whichever had fewer.
    """

    plain: Texts
    accepted: int
    tested: int
    least_drafts: int


@pytest.fixture
def count(pytestconfig: pytest.Config) -> int:
    number: int = pytestconfig.getoption("--coupled-requests")
    return number


def seeded(count: int, prompts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[DecodingRequest]:
    """Requests of their own each, most of them at temperature 1."""
    dice, wanted = random.Random(5), []
    for index in range(count):
        sampling: dict[str, Any] = {"temperature": dice.choice([1.0, 1.0, 0.7, 1.5])}
        if index % 3 == 1:
            sampling |= {"top_k": dice.choice([5, 40])}
        if index % 5 == 2:
            sampling |= {"frequency_penalty": 0.5, "min_p": 0.01}
        prompt = prompts[index % len(prompts)]
        wanted.append(
            request(prompt, tokens, rule=Rule.COUPLED, seed=dice.getrandbits(64), stop_token_ids=(EOS,), **sampling)
        )
    return wanted


async def texts(made: Decoder, wanted: Sequence[DecodingRequest], gamma: int | None, *, beside: int = BESIDE) -> Texts:
    """All answers, so many at a time; the next one begins when any ends, so that neighbours are at any place."""
    seats, began_s = asyncio.Semaphore(beside), time.monotonic()

    async def one(asked: DecodingRequest) -> list[int]:
        async with seats:
            values = {name: getattr(asked, name) for name in DecodingRequest.__dataclass_fields__}
            return (await answer(made, DecodingRequest(**{**values, "num_speculative_tokens": gamma}))).tokens

    answered = list(await asyncio.gather(*map(one, wanted)))
    took_s = time.monotonic() - began_s
    print(f"coupled: {len(wanted)} texts, gamma {gamma}, {beside} at a time: {took_s:.1f} s", flush=True)
    return answered


def different(plain: Texts, got: Texts) -> list[int]:
    return [index for index, (one, other) in enumerate(zip(plain, got, strict=True)) if one != other]


async def check_all(target: int, draft: int, wanted: Sequence[DecodingRequest], alone: int = 1) -> Checked:
    """Compares everything that a living draft does.

    Args:
        alone: each so manieth is decoded without neighbours.
    """
    async with decoder(target, draft, self_draft=True) as made:
        plain = await texts(made, wanted, 0)
        assert made.counters.num_drafts == 0
        assert len({tuple(text) for text in plain}) > len(wanted) / 2
        drafts = []
        for gamma in (1, 4, None):
            before = made.counters.num_drafts
            assert different(plain, await texts(made, wanted, gamma)) == []
            drafts.append(made.counters.num_drafts - before)
        assert different(plain[::alone], await texts(made, wanted[::alone], 4, beside=1)) == []
        counters = made.counters
        print(f"coupled: {counters.num_accepted_tokens} of {counters.num_tested_tokens} tested slots accepted")
    return Checked(plain, counters.num_accepted_tokens, counters.num_tested_tokens, min(drafts[:2]))


async def while_the_draft_dies(target: int, model: str, folder: Path, wanted: Sequence[DecodingRequest]) -> Texts:
    """Answers with gamma 4, of which the draft sees the first ones only; it is killed with rounds in flight."""
    with service("draft_service", model, folder) as part:
        async with decoder(target, part.port, self_draft=True) as made:
            answered = 0

            def on_step(side: str, timings: Timings) -> None:
                nonlocal answered
                answered += side == "draft"
                if answered == DRAFTED_BEFORE_DEATH:
                    part.process.send_signal(signal.SIGKILL)

            made.counters.on_step.append(on_step)
            got = await texts(made, wanted, 4)
            assert made.counters.num_drafts > 0
            assert sum(made.counters.draft_failures.values()) > 0
        assert part.process.wait() == -signal.SIGKILL
    return got


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("llama") / "model", tokenizer=False))


async def test_in_float64_on_a_tiny_model(llama: str, tmp_path: Path, count: int) -> None:
    """No excuse allowed."""
    torch.set_num_threads(1)
    prompts = [[5 + i * i * n % 90 for i in range(3 + n)] for n in range(1, 24)]
    wanted = seeded(count, prompts)
    async with target_service(llama, dtype="float64") as target:
        # A draft of lower precision is a draft of its own: some of its tokens are wrong.
        async with draft_service(llama, dtype="bfloat16") as draft:
            plain, accepted, tested, least_drafts = await check_all(target, draft, wanted)
        assert 0 < accepted < tested and least_drafts > 0
        assert different(plain, await while_the_draft_dies(target, llama, tmp_path, wanted)) == []


async def test_a_draft_that_is_believed_blindly_is_seen(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted error: every drafted token is accepted."""
    wanted = seeded(32, [(5, 6, 7), (9, 10)])
    async with (
        target_service(llama, dtype="float64") as target,
        draft_service(llama, dtype="bfloat16") as draft,
        decoder(target, draft, self_draft=True) as made,
    ):
        plain = await texts(made, wanted, 0)
        monkeypatch.setattr("coordinator.acceptance.matched_counts", lambda x, emit, m: np.asarray(m))
        assert different(plain, await texts(made, wanted, 4))


async def test_noise_that_depends_on_the_pass_is_seen(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted error: the noise of a row is named by its place in the pass, not by its position in the text."""

    def by_row(keys: U64, positions: U32, samples: U32) -> U64:
        return gumbel_row_keys(keys, np.arange(len(positions), dtype=np.uint32), samples)

    monkeypatch.setattr("target_service.scoring.gumbel_row_keys", by_row)
    wanted = seeded(32, [(5, 6, 7), (9, 10)])
    async with (
        target_service(llama, dtype="float64") as target,
        draft_service(llama, dtype="bfloat16") as draft,
        decoder(target, draft, self_draft=True) as made,
    ):
        assert different(await texts(made, wanted, 0), await texts(made, wanted, 4))


@pytest.mark.long
@pytest.mark.timeout(7_200)
async def test_as_it_is_served_on_the_default_pair(
    default_model_dir: Path, chats: list[tuple[int, ...]], tmp_path: Path, pytestconfig: pytest.Config, count: int
) -> None:
    """The number format that the engine picks here, or `--coupled-dtype`; every difference counts."""
    wanted = seeded(count, [chat[:SHORTER] for chat in chats], FEWER_TOKENS)
    dtype = pytestconfig.getoption("--coupled-dtype")
    engine: dict[str, Any] = {"dtype": dtype, "threads": len(os.sched_getaffinity(0)), "kv_cache_tokens": KV_TOKENS}
    async with target_service(str(default_model_dir), **engine) as target, draft_service("ngram") as draft:
        done, accepted, tested, drafts, end_s = (
            0,
            0,
            0,
            0,
            time.monotonic() + 60 * pytestconfig.getoption("--coupled-minutes"),
        )
        for start in range(0, count, WAVE):
            wave = wanted[start : start + WAVE]
            checked = await check_all(target, draft, wave, ALONE)
            dying = await while_the_draft_dies(target, "ngram", tmp_path / str(start), wave)
            assert different(checked.plain, dying) == []
            done, accepted, tested = done + len(wave), accepted + checked.accepted, tested + checked.tested
            drafts += checked.least_drafts
            if time.monotonic() > end_s:
                break
    assert 0 < accepted < tested and drafts > 0
    print(f"coupled: {done} of {count} requests, all texts equal, {accepted} of {tested} tested slots accepted")
