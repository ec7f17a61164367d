"""KV through the whole pair: samples of one prompt read it once; a draft without room costs acceptance, never text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coordinator.decoder import Decoder
from outrider.sampling import Rule
from outrider.v1 import common_pb2, draft_pb2_grpc, target_pb2_grpc
from tests.service.harness import channel_to
from tests.service.stack import answer, answers, decoder, draft_service, request, target_service
from tests.unit.tiny import tiny_llama

TOKENS = [5 + i * i % 90 for i in range(200)]
SCRIPT = "tokens=" + ",".join(map(str, TOKENS))


async def prefix_tokens_found(port: int, stub: type) -> int:
    async with channel_to(port) as channel:
        return (await stub(channel).GetInfo(common_pb2.GetInfoRequest())).info.prefix_tokens_found


async def test_samples_of_one_prompt_read_it_once_on_both_sides(tmp_path: Path) -> None:
    """Guards n > 1: sixteen samples cost one prompt, and each one's text is what it is alone."""
    torch.set_num_threads(1)
    model = str(tiny_llama(tmp_path / "model"))
    prompt = [1 + i * 37 % 120 for i in range(150)]
    async with (
        target_service(model, dtype="float32") as target,
        draft_service(model, dtype="float32") as draft,
        decoder(target, draft, self_draft=True) as made,
    ):
        fields = {"gamma": 2, "seed": 3, "rule": Rule.COUPLED}
        together = await answers(
            made, [request(prompt, 12, sample_index=i, prompt_group=7, **fields) for i in range(16)]
        )
        for stub, port in ((target_pb2_grpc.TargetServiceStub, target), (draft_pb2_grpc.DraftServiceStub, draft)):
            assert await prefix_tokens_found(port, stub) >= 15 * 149
        cached = [one.stats.cached_tokens for one in together]
        assert cached == [0] + [149] * 15
        assert made.counters.prefix_tokens["target"] == 15 * 149 <= made.counters.prefix_tokens["draft"]
        alone = [await answer(made, request(prompt, 12, sample_index=i, **fields)) for i in (0, 7, 15)]
    assert [one.tokens for one in alone] == [together[i].tokens for i in (0, 7, 15)]
    assert len({tuple(one.tokens) for one in together}) > 8
    assert made.counters.num_accepted_tokens > 0


async def test_streams_that_give_way_are_counted_and_their_texts_are_right() -> None:
    """Guards a pool for two and a half of four streams: right texts, and preemptions that an operator can see."""
    async with (
        target_service(f"stub:script?{SCRIPT}", kv_cache_tokens=160) as target,
        draft_service(f"stub:perfect?{SCRIPT}") as draft,
        decoder(target, draft) as made,
    ):
        got = await answers(made, [request([index] * 4, 60, gamma=4) for index in range(4)])
        assert all(one.tokens == TOKENS[:60] for one in got)
        assert 0 < made.counters.preemptions["target"] <= 3
        async with channel_to(target) as channel:
            info = (await target_pb2_grpc.TargetServiceStub(channel).GetInfo(common_pb2.GetInfoRequest())).info
        assert info.preemptions == made.counters.preemptions["target"]


def skipped(made: Decoder, reason: str) -> int:
    return made.counters.draft_skipped[reason]


async def test_a_prompt_beyond_the_drafts_context_costs_nobody_else_anything() -> None:
    """Guards seven short streams beside a long one: their acceptance stays whole, and the long one is served."""
    async with (
        target_service(f"stub:script?{SCRIPT}") as target,
        draft_service(f"stub:perfect?{SCRIPT}", max_model_len=128) as draft,
        decoder(target, draft) as made,
    ):
        wanted = [request([1] * 300, 60, gamma=4), *(request([index] * 8, 60, gamma=4) for index in range(2, 9))]
        long, *short = await answers(made, wanted)
        assert all(one.tokens == TOKENS[:60] for one in (long, *short))
        assert not any(long.drafted)
        assert all(one.stats.num_accepted_draft_tokens == one.stats.num_draft_tokens > 0 for one in short)
        assert skipped(made, "context") > 0 and skipped(made, "no_room") == 0


@pytest.mark.parametrize("pool", [96])
async def test_a_draft_pool_for_two_of_eight_leaves_the_texts_right(pool: int) -> None:
    """Guards the draft's own budget: who finds no room decodes plainly, says why, and drafts when there is room."""
    async with (
        target_service(f"stub:script?{SCRIPT}&fixed_ms=5") as target,
        draft_service(f"stub:perfect?{SCRIPT}", kv_cache_tokens=pool) as draft,
        decoder(target, draft) as made,
    ):
        got = await answers(made, [request([index] * 20, 40 + 10 * index, gamma=4) for index in range(8)])
        assert all(one.tokens == TOKENS[: len(one.tokens)] and len(one.tokens) >= 40 for one in got)
        assert skipped(made, "kv") > 0
        assert any(any(one.drafted) for one in got)
        last = await answer(made, request([50] * 20, 40, gamma=4))
        assert any(last.drafted)
