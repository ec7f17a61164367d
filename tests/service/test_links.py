"""The coordinator's links: one message each way per round, reconnects, refusals, deadlines, and what is freed when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from coordinator.decoder import Decoder, DecoderConfig
from coordinator.link import Link
from draft_service.config import DraftConfig
from draft_service.service import DraftService
from outrider.errors import DeadlineExceeded, InvalidArgument, Unavailable
from outrider.rpc import options
from outrider.rpc.credentials import TlsFiles, open_channel
from outrider.v1 import common_pb2, draft_pb2_grpc, target_pb2_grpc
from target_service.config import TargetConfig
from target_service.service import TargetService
from tests.service.harness import channel_to
from tests.service.stack import answer, answers, config, decoder, draft_service, pair, request, target_service, until
from tests.unit.tiny import tiny_llama

TOKENS = [5 + i * i % 90 for i in range(400)]
SCRIPT = "tokens=" + ",".join(map(str, TOKENS))
NOWHERE = 1
"""A port on which nothing listens."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def links(made: Decoder) -> tuple[Link, Link]:  # type: ignore[type-arg]
    draft = made._draft.link
    assert draft is not None
    return made._target.links[0], draft


async def held(target: int, draft: int) -> tuple[int, int, int, int]:
    """Streams and KV blocks that target and draft hold."""
    async with channel_to(target) as one, channel_to(draft) as other:
        t = (await target_pb2_grpc.TargetServiceStub(one).GetInfo(common_pb2.GetInfoRequest())).info
        d = (await draft_pb2_grpc.DraftServiceStub(other).GetInfo(common_pb2.GetInfoRequest())).info
    return t.open_streams, t.kv_blocks_used, d.open_streams, d.kv_blocks_used


async def comes_to_nothing(target: int, draft: int) -> None:
    """Waits until no part holds anything."""
    async with asyncio.timeout(10):
        while any(await held(target, draft)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class TestMessages:
    async def test_a_round_costs_one_message_each_way_per_side_whatever_the_number_of_streams(self) -> None:
        """One message per stream and round would cap the whole coordinator at a few hundred streams."""
        async with pair(
            f"stub:script?{SCRIPT}&fixed_ms=20", f"stub:perfect?{SCRIPT}", num_speculative_tokens=3
        ) as made:
            await answer(made, request([1], 40, temperature=0.0))  # so that no timer is surprised
            target, draft = links(made)
            await asyncio.gather(*(answer(made, request([1 + i], 160, temperature=0.0)) for i in range(24)))
            before = made.counters.num_drafts, target.messages_sent, draft.messages_sent
            back = target.messages_received, draft.messages_received
            got = await answers(made, [request([1 + i], 161, temperature=0.0) for i in range(24)])
            rounds = max(one.stats.rounds for one in got)
            assert made.counters.num_drafts - before[0] >= 24 * 39
            # A few rounds more than the longest stream has: streams start and fall behind one by one.
            assert target.messages_sent - before[1] <= 1.5 * rounds + 10
            assert target.messages_received - back[0] <= 1.5 * rounds + 10
            assert draft.messages_sent - before[2] <= 1.5 * rounds + 10
            assert draft.messages_received - back[1] <= 1.5 * rounds + 10

    async def test_idle_link_stays_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Either side says something every few seconds, so that silence means death."""
        monkeypatch.setattr("coordinator.link.IDLE_BATCH_INTERVAL_S", 0.05)
        monkeypatch.setattr("outrider.rpc.session.IDLE_BATCH_INTERVAL_S", 0.05)
        monkeypatch.setattr("coordinator.link.LEASE_S", 1.0)
        async with pair(f"stub:script?{SCRIPT}", f"stub:perfect?{SCRIPT}") as made:
            target, draft = links(made)
            await asyncio.sleep(2.0)
            assert (target._epoch, draft._epoch) == (1, 1)

    async def test_silent_service_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A connection that is up says nothing about the process behind it."""
        monkeypatch.setattr("coordinator.link.LEASE_S", 0.3)
        async with pair(f"stub:script?{SCRIPT}", f"stub:perfect?{SCRIPT}") as made:
            target, _ = links(made)
            await until(lambda: target._epoch >= 2)


class TestLife:
    async def test_cancelled_streams_leave_nothing_behind(self) -> None:
        """Whether it waits for the draft, for the target or in a plain run: both sides' KV must be freed."""
        async with (
            target_service(f"stub:script?{SCRIPT}&fixed_ms=5") as target,
            draft_service(f"stub:perfect?{SCRIPT}&token_ms=2") as draft,
            decoder(target, draft, num_speculative_tokens=3) as made,
        ):
            streams = [made.open(request([1 + i], 400, gamma=i % 4, temperature=0.0)) for i in range(20)]
            for wanted, stream in enumerate(streams):
                for _ in range(1 + wanted % 3):
                    await anext(stream)
            assert (await held(target, draft))[0] == 20
            await asyncio.gather(*(stream.aclose() for stream in streams))
            await comes_to_nothing(target, draft)
            with pytest.raises(StopAsyncIteration):
                await anext(streams[0])
            assert len(made._streams) == 0
            assert (await answer(made, request([1], 40, temperature=0.0))).tokens == TOKENS[:40]

    async def test_finished_streams_leave_nothing_behind(self) -> None:
        async with (
            target_service(f"stub:script?{SCRIPT}") as target,
            draft_service(f"stub:perfect?{SCRIPT}") as draft,
            decoder(target, draft) as made,
        ):
            await answers(made, [request([1 + i], 20 + i, temperature=0.0) for i in range(16)])
            await comes_to_nothing(target, draft)

    async def test_closing_the_decoder_frees_both_sides_at_once(self) -> None:
        """Not only when the lease has ended."""
        async with (
            target_service(f"stub:script?{SCRIPT}&fixed_ms=5") as target,
            draft_service(f"stub:perfect?{SCRIPT}") as draft,
        ):
            async with decoder(target, draft) as made:
                stream = made.open(request([1], 400, temperature=0.0))
                await anext(stream)
            with pytest.raises(Unavailable, match="shutting down"):
                async for _ in stream:
                    pass
            await comes_to_nothing(target, draft)

    async def test_deadline_ends_a_stream_with_its_error(self) -> None:
        """After the deadline nothing may be computed for it any more (field fault 94)."""
        async with (
            target_service(f"stub:script?{SCRIPT}&fixed_ms=20") as target,
            draft_service(f"stub:perfect?{SCRIPT}") as draft,
            decoder(target, draft) as made,
        ):
            stream = made.open(request([1], 400, gamma=0, temperature=0.0, deadline_s=0.3))
            with pytest.raises(DeadlineExceeded):
                async for _ in stream:
                    pass
            await comes_to_nothing(target, draft)

    async def test_without_a_target_a_stream_waits_until_its_deadline(self) -> None:
        """An error frame, never a silent `stop`."""
        made = Decoder(config(NOWHERE))
        await made.start()
        assert made.state.target is None and made.state.degraded[0].part == "target"
        with pytest.raises(DeadlineExceeded):
            await answer(made, request([1], 4, deadline_s=0.2))
        await made.close()

    async def test_decoder_belongs_to_one_event_loop(self) -> None:
        """grpc.aio channels used from two loops hang or drop wake-ups (field fault 92)."""
        async with pair(f"stub:script?{SCRIPT}", None) as made:
            caught: list[BaseException] = []

            def elsewhere() -> None:
                async def use() -> None:
                    made.open(request([1], 4))

                try:
                    asyncio.run(use())
                except RuntimeError as error:
                    caught.append(error)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            await asyncio.to_thread(thread.join)
            assert "event loop" in str(caught[0])

    @pytest.mark.parametrize(
        ("prompt", "fields", "field"),
        [((), {}, "prompt"), ((1,), {"gamma": 9}, "num_speculative_tokens"), ((1,), {"deadline_s": 0.0}, "deadline_s")],
    )
    async def test_bad_requests_are_refused_by_name(
        self, prompt: tuple[int, ...], fields: dict[str, object], field: str
    ) -> None:
        async with pair(f"stub:script?{SCRIPT}", None) as made:
            with pytest.raises(InvalidArgument, match=field):
                made.open(request(prompt, 4, **fields))  # type: ignore[arg-type]

    async def test_prompt_that_fills_the_context_is_refused(self) -> None:
        async with target_service(f"stub:script?{SCRIPT}", max_model_len=16) as target, decoder(target) as made:
            with pytest.raises(InvalidArgument, match="no room"):
                await answer(made, request([1] * 16, 4))
            got = await answer(made, request([1] * 10, 40, temperature=0.0))
            assert (len(got.tokens), got.finish_reason) == (6, "length")


class TestReconnect:
    async def test_lost_link_finds_its_streams_again(self) -> None:
        """Within the lease nothing is prefilled again, and no token is lost or doubled."""
        async with pair(f"stub:script?{SCRIPT}&fixed_ms=5", f"stub:perfect?{SCRIPT}") as made:
            running = asyncio.create_task(
                answers(made, [request([1 + i], 200, gamma=3 * (i % 2), temperature=0.0) for i in range(4)])
            )
            target, draft = links(made)
            for cut in range(1, 4):
                await until(lambda cut=cut: made.counters.generated_tokens >= 100 * cut)  # type: ignore[misc]
                target.restart("cut by the test")
                draft.restart("cut by the test")
                await until(lambda cut=cut: target.is_up and target._epoch > cut)  # type: ignore[misc]
            assert [one.tokens for one in await running] == [TOKENS[:200]] * 4
            assert made.counters.reopened == 0

    async def test_draft_is_taken_up_when_it_comes(self) -> None:
        """The coordinator serves without a draft and needs no restart when there is one."""
        async with target_service(f"stub:script?{SCRIPT}") as target:
            async with draft_service(f"stub:perfect?{SCRIPT}") as port:
                pass  # a port that is free now
            made = Decoder(config(target, port))
            await made.start()
            await until(lambda: made.state.target is not None)
            assert (await answer(made, request([1], 30, temperature=0.0))).tokens == TOKENS[:30]
            assert made.state.degraded[0].part == "draft"
            async with draft_service(f"stub:perfect?{SCRIPT}", port=port):
                await until(lambda: made.state.draft is not None)
                got = await answer(made, request([1], 100, gamma=4, temperature=0.0))
                assert got.tokens == TOKENS[:100]
                assert got.stats.num_accepted_draft_tokens > 0
                assert made.state.degraded == []
            await made.close()

    async def test_a_thousand_tries_at_a_dead_port_leave_no_tasks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Memory that grows while a service is away (field fault 90)."""
        monkeypatch.setattr("coordinator.link.RECONNECT_BACKOFF_INITIAL_MS", 1)
        monkeypatch.setattr("coordinator.link.RECONNECT_BACKOFF_MAX_MS", 1)
        made = Decoder(config(NOWHERE, NOWHERE))
        await made.start()
        await asyncio.sleep(0.2)
        tasks = len(asyncio.all_tasks())
        await asyncio.sleep(1.0)
        assert len(asyncio.all_tasks()) <= tasks + 2
        await made.close()
        await until(lambda: len(asyncio.all_tasks()) == 1)


class TestHang:
    """A process that stands still keeps its connections up."""

    async def test_hung_draft_costs_speed_only_and_is_back_soon_after(self) -> None:
        async with target_service(f"stub:script?{SCRIPT}&fixed_ms=10") as target:
            service = DraftService(DraftConfig(model=f"stub:perfect?{SCRIPT}", port=0, threads=1))
            port = await service.start()
            await service.ready()
            async with decoder(target, port, num_speculative_tokens=2) as made:
                running = asyncio.create_task(answer(made, request([1], 400, temperature=0.0)))
                await until(lambda: made.counters.num_drafts >= 20)
                awake = threading.Event()
                hang = service._backend._runner.call(awake.wait)  # type: ignore[attr-defined]
                await until(lambda: made.state.degraded != [])
                assert made.counters.draft_failures["overdue"] >= 2
                emitted = made.counters.generated_tokens
                await until(lambda: made.counters.generated_tokens >= emitted + 20)
                awake.set()
                hang.result()
                drafts = made.counters.num_drafts
                await until(lambda: made.counters.num_drafts > drafts, within_s=5.0)
                assert (await running).tokens == TOKENS[:400]
                assert made.state.degraded == []
            await service.stop()

    async def test_trial_of_a_hung_draft_may_end_with_its_stream(self) -> None:
        """The answer to the trial goes unread; another stream must try, or the draft is out for good."""
        async with target_service(f"stub:script?{SCRIPT}&fixed_ms=10") as target:
            service = DraftService(DraftConfig(model=f"stub:perfect?{SCRIPT}", port=0, threads=1))
            port = await service.start()
            await service.ready()
            async with decoder(target, port, num_speculative_tokens=2) as made:
                health = made._draft.health
                first = made.open(request([1], 400, temperature=0.0))
                await until(lambda: made.counters.num_drafts >= 5)
                awake = threading.Event()
                hang = service._backend._runner.call(awake.wait)  # type: ignore[attr-defined]
                health.take_out("by the test", 0.0)
                await until(lambda: health.probing)
                await first.aclose()
                awake.set()
                hang.result()
                drafts = made.counters.num_drafts
                running = asyncio.create_task(answer(made, request([2], 400, temperature=0.0)))
                await until(lambda: made.counters.num_drafts > drafts, within_s=5.0)
                assert (await running).tokens == TOKENS[:400]
            await service.stop()

    async def test_silent_target_is_connected_to_anew_and_the_text_goes_on(self) -> None:
        service = TargetService(TargetConfig(model=f"stub:script?{SCRIPT}&fixed_ms=5", port=0, threads=1))
        port = await service.start()
        await service.ready()
        async with decoder(port) as made:
            running = asyncio.create_task(answers(made, [request([1 + i], 300, temperature=0.0) for i in range(2)]))
            await until(lambda: made.counters.generated_tokens >= 100)
            awake = threading.Event()
            hang = service._backend._runner.call(awake.wait)
            await until(lambda: made._target.links[0]._epoch >= 2)
            awake.set()
            hang.result()
            assert [one.tokens for one in await running] == [TOKENS[:300]] * 2
        await service.stop()

    async def test_hung_engine_hands_its_streams_on_even_while_it_reads_a_prompt(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No time limit of the coordinator's fits a prompt; only the service can tell a long step from a hung one."""
        monkeypatch.setattr("outrider.engine.step_meter.STUCK_AFTER_S", 0.2)
        monkeypatch.setattr("outrider.engine.step_meter.STUCK_TOKEN_S", 0.0)
        monkeypatch.setattr("outrider.service.service._WATCH_INTERVAL_S", 0.05)
        service = TargetService(TargetConfig(model=f"stub:script?{SCRIPT}", port=0, threads=1))
        port = await service.start()
        await service.ready()
        model = service._backend._model  # type: ignore[attr-defined]
        awake, forward = threading.Event(), model.forward
        monkeypatch.setattr(model, "forward", lambda spans: (awake.wait(), forward(spans))[1])
        async with target_service(f"stub:script?{SCRIPT}") as other, decoder((port, other)) as made:
            running = answers(made, [request([1] * 500, 40, temperature=0.0) for _ in range(2)])
            assert [one.tokens for one in await asyncio.wait_for(running, 30)] == [TOKENS[:40]] * 2
            assert made.state.targets_up == 1 and "hangs" in made.state.degraded[0].reason
            awake.set()
            await until(lambda: made.state.targets_up == 2)
        await service.stop()

    async def test_a_draining_target_gets_no_new_streams_and_finishes_those_it_has(self) -> None:
        """With new ones it would never be idle, and a rolling restart would wait for the whole grace at each target."""
        same = f"stub:script?{SCRIPT}&fixed_ms=5"
        service = TargetService(TargetConfig(model=same, port=0, threads=1))
        port = await service.start()
        await service.ready()
        async with target_service(same) as other, decoder((port, other)) as made:
            running = asyncio.create_task(answer(made, request([1], 100, gamma=0, temperature=0.0)))
            await until(lambda: made.counters.generated_tokens >= 10)
            stopping = asyncio.create_task(service.stop(30.0))
            await until(lambda: made._target.links[0].is_draining)
            assert (await answer(made, request([2], 20, gamma=0, temperature=0.0))).tokens == TOKENS[:20]
            assert (await running).tokens == TOKENS[:100]
            await asyncio.wait_for(stopping, 10.0)
            assert made.counters.reopened == 0


class TestRefusals:
    async def test_replicas_of_different_models_are_not_mixed(self) -> None:
        """Both links come up at the same time; a stream that changes over would go on in another model's words."""
        async with target_service(f"stub:script?{SCRIPT}") as one, target_service("stub:script?tokens=7") as other:
            made = Decoder(config((one, other)))
            await made.start()
            await until(lambda: any("another model" in link.reason for link in made._target.links))
            await until(lambda: made.state.targets_up == 1)
            await made.close()

    async def test_replicas_of_different_arithmetic_are_not_mixed(self, tmp_path: Path) -> None:
        """One model in two number formats is two models: a stream that changes over would go on in other words."""
        folder = str(tiny_llama(tmp_path, tokenizer=True, vocab=257))
        async with target_service(folder, dtype="float32") as one, target_service(folder, dtype="bfloat16") as other:
            made = Decoder(config((one, other)))
            await made.start()
            await until(lambda: any("start all targets alike" in link.reason for link in made._target.links))
            await until(lambda: made.state.targets_up == 1)
            await made.close()

    async def test_a_target_that_comes_back_as_another_model_is_refused(self) -> None:
        """Whoever took the first one's tokenizer would go on with it, and answer in the wrong words."""
        async with target_service(f"stub:script?{SCRIPT}") as port:
            made = Decoder(config(port))
            await made.start()
            await until(lambda: made.state.targets_up == 1)
        async with target_service("stub:script?tokens=7", port=port):
            await until(lambda: "restart the coordinator" in made._target.links[0].reason)
            assert made.state.targets_up == 0
            await made.close()

    async def test_draft_with_another_vocabulary_is_refused_and_decoding_goes_on(self, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
        """Tokenizers of equal size that disagree make every acceptance rate a lie (field fault 102: say so)."""
        llama = str(tiny_llama(tmp_path_factory.mktemp("llama") / "model", vocab=260, tokenizer=True))
        async with target_service("stub:markov") as target, draft_service(llama) as draft:
            made = Decoder(config(target, draft))
            await made.start()
            await until(lambda: any("refused" in part.reason for part in made.state.degraded))
            assert made.state.draft is None
            assert made.counters.draft_failures["refused"] == 1
            assert len((await answer(made, request([65], 20))).tokens) == 20
            await made.close()
            async with decoder(target, draft, allow_vocab_mismatch=True) as other:
                assert len((await answer(other, request([65], 20))).tokens) == 20

    @pytest.mark.parametrize(
        ("constant", "value", "message"),
        [
            ("RULE_VERSION", 2, "acceptance rule.*upgrade the draft service"),
            ("NOISE_VERSION", 0, "noise functions.*upgrade the coordinator"),
        ],
    )
    async def test_versions_that_differ_are_named_with_the_side_to_upgrade(
        self, constant: str, value: int, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two builds that draw different noise are silently wrong, not slow."""
        async with target_service("stub:markov") as target, draft_service("stub:perfect") as draft:
            real = getattr(options, constant)
            monkeypatch.setattr(f"coordinator.parts.{constant}", value)
            made = Decoder(config(target, draft))
            await made.start()
            await until(lambda: "upgrade" in made._target.links[0].reason)
            assert real != value
            side = message.rpartition("upgrade the ")[2].replace("draft", "target")
            assert made._target.links[0].reason.endswith(side)
            await made.close()

    async def test_the_target_as_its_own_draft_is_warned_of_unless_meant(
        self, tmp_path, caplog: pytest.LogCaptureFixture
    ) -> None:  # type: ignore[no-untyped-def]
        """Speculation that does nothing while the log names the right files (field fault 138)."""
        llama = str(tiny_llama(tmp_path / "model"))
        async with target_service(llama) as target, draft_service(llama) as draft:
            async with decoder(target, draft):
                assert caplog.text.count("the same model") == 1
            caplog.clear()
            async with decoder(target, draft, self_draft=True):
                assert "the same model" not in caplog.text


class TestNames:
    async def test_a_service_is_found_where_it_is_now(self) -> None:
        """On a cluster a replica comes back on another node: a stream goes on there, from its committed tokens."""
        places: dict[str, int] = {}
        asked: list[str] = []

        async def resolve(name: str) -> str:
            asked.append(name)
            if name not in places:
                raise Unavailable(f"{name} has not started yet")
            return f"127.0.0.1:{places[name]}"

        model = f"stub:script?{SCRIPT}&fixed_ms=5"
        made = Decoder(DecoderConfig(target=("the target",), resolve=resolve))
        await made.start()
        try:
            answering = asyncio.create_task(answer(made, request([1], 300, temperature=0.0)))
            await until(lambda: len(asked) > 1)
            assert "has not started yet" in made.state.degraded[0].reason
            async with target_service(model) as places["the target"]:
                await until(lambda: made.counters.generated_tokens > 20)
            async with target_service(model) as places["the target"]:
                got = await asyncio.wait_for(answering, 30)
            assert got.tokens == TOKENS[:300]
            assert made.counters.reopened >= 1
            assert set(asked) == {"the target"}
        finally:
            await made.close()

    async def test_a_name_is_looked_up_anew_after_each_failed_attempt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A restarted container has another address, and gRPC's own channel would go on with the old one for long."""
        places = {"draft": NOWHERE}

        def opened(address: str, tls: TlsFiles, authority: str) -> grpc.aio.Channel:
            name = address.partition(":")[0]  # as a resolver does it: once, when the channel is made
            return open_channel(f"127.0.0.1:{places[name]}" if name in places else address, tls, authority)

        monkeypatch.setattr("coordinator.service_channel.open_channel", opened)
        async with target_service(f"stub:script?{SCRIPT}") as target:
            made = Decoder(DecoderConfig(target=(f"127.0.0.1:{target}",), draft="draft:1"))
            await made.start()
            try:
                await until(lambda: "connect" in links(made)[1].reason)
                async with draft_service(f"stub:perfect?{SCRIPT}") as places["draft"]:
                    await until(lambda: made.state.draft is not None)
            finally:
                await made.close()
