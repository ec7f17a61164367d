"""An EAGLE-3 head over real gRPC: the text is the target's, and the head proposes what it would beside the target."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator import decoding
from coordinator.decoder import Decoder
from coordinator.feature_side import FeatureSide
from coordinator.state import Proposal, StreamState
from outrider.engine.eagle3_checkpoint import load
from outrider.features import FeatureBlock
from outrider.sampling import Form, Rule
from tests.service.stack import answers, decoder, draft_service, request, target_service, until
from tests.unit.heads import VOCAB, Reference, random_head, random_target

PROMPTS = [(5, 6, 7, 5, 6, 7, 5, 6), (9,), tuple(range(3, 50)), (3, 3, 3), tuple(range(60, 30, -1))]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return random_head(tmp_path_factory.mktemp("head"), target)


@asynccontextmanager
async def pair(target: Path, head: Path, **fields: Any) -> AsyncIterator[Decoder]:
    async with (
        target_service(str(target), dtype="float32") as target_port,
        draft_service(str(head), dtype="float32") as draft_port,
        decoder(target_port, draft_port, **fields) as made,
    ):
        yield made


async def texts(made: Decoder, gamma: int, **fields: Any) -> list[list[int]]:
    wanted = [request(prompt, 40, gamma=gamma, **fields) for prompt in PROMPTS]
    return [one.tokens for one in await answers(made, wanted)]


@pytest.mark.parametrize("layout", ["published", "speculators"])
async def test_the_text_is_that_of_plain_decoding(target: Path, tmp_path: Path, layout: Any) -> None:
    """Guards exactness with either layout: greedy and coupled text do not depend on the draft, token for token."""
    async with pair(target, random_head(tmp_path / "head", target, layout)) as made:
        for fields in ({"temperature": 0.0}, {"rule": Rule.COUPLED, "seed": 4}):
            plain = await texts(made, 0, **fields)
            for gamma in (1, 3, 5):
                assert await texts(made, gamma, **fields) == plain
        counters = made.counters
        assert counters.num_drafts > 50
        assert counters.num_accepted_tokens > 0, "even a random head shares some tokens with its target under coupling"
        assert counters.draft_skipped["empty"] == 0
        assert counters.draft_skipped["no_features"] == 0, "the first plain token of a stream brings the features"


class Recorder:
    """Keeps every proposal that is verified, with the tokens that it continues."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], Proposal]] = []
        verify = decoding.verify

        def recording(state: StreamState, proposal: Proposal, **fields: Any) -> Any:
            self.seen.append((list(state.tokens), proposal))
            return verify(state, proposal, **fields)

        monkeypatch.setattr(decoding, "verify", recording)

    def differences(self, reference: Reference) -> list[float]:
        """Total variation between each q and that of a head that computes everything anew."""
        found = []
        for tokens, proposal in self.seen:
            expected = reference.q(tokens, proposal.draft_ids.tolist(), origin=0)
            found += (np.abs(proposal.dense_q.reshape(-1, VOCAB) - expected).sum(axis=1) / 2).tolist()
        return found


def lose_rows(monkeypatch: pytest.MonkeyPatch, _made: Decoder) -> None:
    """Now and then the features do not reach the draft."""
    take, dice = FeatureSide.take, random.Random(0)

    def lossy(self: FeatureSide) -> FeatureBlock | None:
        block = take(self)
        return None if dice.random() < 0.2 else block

    monkeypatch.setattr(FeatureSide, "take", lossy)


def restart_draft(monkeypatch: pytest.MonkeyPatch, made: Decoder) -> None:
    """Now and then the draft has lost a stream, as after a restart."""
    ask, dice = decoding.propose, random.Random(1)

    def forgetful(state: StreamState, *arguments: Any, **fields: Any) -> Any:
        row = ask(state, *arguments, **fields)
        if dice.random() < 0.2:
            assert made._draft.link is not None
            made._draft.link._outbox.closed.append(state.stream_id)
        return row

    monkeypatch.setattr(decoding, "propose", forgetful)


def run_plainly(monkeypatch: pytest.MonkeyPatch, made: Decoder) -> None:
    """Now and then a stream is decoded plainly for a while."""
    why_not, dice = made._draft.why_not, random.Random(2)

    def held(stream: Any) -> str | None:
        if dice.random() < 0.3:
            stream.held_until_s = time.monotonic() + 0.003
        return why_not(stream)

    monkeypatch.setattr(made._draft, "why_not", held)


@pytest.mark.parametrize("trouble", [None, lose_rows, restart_draft, run_plainly])
async def test_a_remote_head_proposes_what_a_local_one_would(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, trouble: Any
) -> None:
    """Guards acceptance end to end: a position off by one anywhere on the way changes q, whatever else goes wrong.

    Every q that reaches the target is compared with that of a head which recomputes the target and itself from scratch.
    """
    recorder = Recorder(monkeypatch)
    async with pair(target, head) as made:
        if trouble is not None:
            trouble(monkeypatch, made)
        wanted = [
            request(prompt, 60, gamma=1 + index, temperature=1.0, form=Form.DENSE, seed=index)
            for index, prompt in enumerate(PROMPTS)
        ]
        ended = await answers(made, wanted)
        skipped = made.counters.draft_skipped
    assert [len(one.tokens) for one in ended] == [60] * len(PROMPTS)
    differences = recorder.differences(Reference(target, load(head, dtype=torch.float32)))
    assert len(differences) > 100
    # Features are rounded to bfloat16 once on either side of a last bit.
    assert max(differences) < 0.02
    if trouble is not None:
        assert skipped["empty"] + skipped["no_features"] + skipped["held"] > 0, "nothing went wrong"


async def test_features_are_counted_as_a_cost_of_their_own(target: Path, head: Path) -> None:
    """Guards the figure that decides whether a head may be served over a link: its features must not hide among ids."""
    async with pair(target, head) as made:
        await texts(made, 3, temperature=1.0)
        wire = made.counters.wire
        row = 3 * 32 * 2
        rows = sum(min(len(prompt), 12) for prompt in PROMPTS) + made.counters.generated_tokens
        assert 0.7 * rows * row < wire["draft"]["features"] <= wire["target"]["features"]
        assert wire["target"]["q"] > 0 and wire["target"]["ids"] > 0


async def test_a_target_without_hidden_states_is_served_without_the_head(head: Path) -> None:
    """Guards the client: a head that does not fit is refused with the reason, and the text comes all the same."""
    async with (
        target_service("stub:script?tokens=1,2,3,4&vocab=64") as target_port,
        draft_service(str(head), dtype="float32") as draft_port,
        decoder(target_port) as bare,
    ):
        made = Decoder(_with_draft(bare, draft_port))
        await made.start()
        try:
            await until(lambda: any("returns none" in part.reason for part in made.state.degraded))
            (one,) = await answers(made, [request((5,), 8, temperature=0.0)])
            assert len(one.tokens) == 8
            assert made.counters.draft_failures["refused"] == 1
        finally:
            await made.close()


def _with_draft(bare: Decoder, port: int) -> Any:
    from dataclasses import replace

    return replace(bare._config, draft=f"127.0.0.1:{port}")
