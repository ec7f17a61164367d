"""The gRPC door over real services with stub models; the HTTP application beside it must say the same."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from coordinator.app import build_app
from coordinator.config import DecoderConfig
from coordinator.decoder import Decoder
from coordinator.front import Front, FrontConfig
from coordinator.generate_request import query_from_pb
from coordinator.servicer import CoordinatorServicer
from outrider.client import Answer, Client, request
from outrider.rpc.options import COORDINATOR_SERVICE_NAME
from outrider.rpc.server import Server
from outrider.tracing import Tracer
from outrider.v1 import common_pb2, coordinator_pb2, coordinator_pb2_grpc, target_pb2_grpc
from tests.service.harness import ANSWER_WITHIN_S, channel_to, draft_service
from tests.service.stack import target_service

TEXT = "Hé😀 the end"
SCRIPT = "tokens=" + ",".join(map(str, TEXT.encode())) + "&eos=257"


class Doors(NamedTuple):
    """A whole stack in the test's process."""

    front: Front
    port: int
    target_port: int
    stub: coordinator_pb2_grpc.CoordinatorServiceStub
    http: httpx.AsyncClient


@asynccontextmanager
async def doors(
    target: str = f"stub:script?{SCRIPT}", draft: str | None = f"stub:perfect?{SCRIPT}"
) -> AsyncIterator[Doors]:
    """Both doors of a coordinator that is ready and, where there is a draft, attached to it."""
    async with target_service(target) as target_port:
        if draft is None:
            async with open_doors(target_port, None) as made:
                yield made
        else:
            async with (
                draft_service(draft, threads=1, kv_cache_tokens=8192) as draft_port,
                open_doors(target_port, draft_port) as made,
            ):
                yield made


@asynccontextmanager
async def open_doors(target_port: int, draft_port: int | None, tracer: Tracer | None = None) -> AsyncIterator[Doors]:
    """Doors before these services."""
    draft = f"127.0.0.1:{draft_port}" if draft_port else None
    decoder = Decoder(DecoderConfig(target=(f"127.0.0.1:{target_port}",), draft=draft))
    front = Front(decoder, FrontConfig(max_speculative_tokens=8), tracer)
    server = Server(COORDINATOR_SERVICE_NAME, message_limit=1 << 20)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(CoordinatorServicer(front), server.grpc)
    port = await server.start("127.0.0.1", 0)
    await front.start()
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            while front.readiness.reason or (draft and decoder.state.draft is None):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        transport = httpx.ASGITransport(build_app(lambda: front))
        async with channel_to(port) as channel, httpx.AsyncClient(transport=transport, base_url="http://door") as http:
            yield Doors(front, port, target_port, coordinator_pb2_grpc.CoordinatorServiceStub(channel), http)
    finally:
        await server.stop()
        await front.close()


async def generate(made: Doors, message: coordinator_pb2.GenerateRequest) -> list[coordinator_pb2.GenerateResponse]:
    return [response async for response in made.stub.Generate(message, timeout=ANSWER_WITHIN_S)]


async def refusal(made: Doors, message: coordinator_pb2.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generate(made, message)
    return error.value.code(), error.value.details() or ""


async def open_streams(made: Doors) -> int:
    async with channel_to(made.target_port) as channel:
        answer = await target_pb2_grpc.TargetServiceStub(channel).GetInfo(common_pb2.GetInfoRequest())
    return int(answer.info.open_streams)


async def all_closed(made: Doors) -> None:
    async with asyncio.timeout(ANSWER_WITHIN_S):
        while await open_streams(made):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_answer_streams_with_its_metrics() -> None:
    """Guards text, ids, flags, counts and the reason of the end, over draft, target and both links."""
    async with doors() as made:
        responses = await generate(made, request("hi", max_tokens=64, temperature=0, num_speculative_tokens=4))
        tokens = [token for response in responses for token in response.token_ids]
        drafted = [flag for response in responses for flag in response.drafted]
        last = responses[-1]
        assert "".join(response.text for response in responses) == TEXT
        assert not any("\ufffd" in response.text for response in responses)
        assert tokens == [*TEXT.encode(), 257]
        assert last.finish_reason == coordinator_pb2.FINISH_REASON_STOP
        assert (last.prompt_tokens, last.completion_tokens) == (3, len(tokens))
        assert sum(drafted) == last.metrics.num_accepted_draft_tokens == last.metrics.num_draft_tokens > 0
        assert last.metrics.rule == common_pb2.ACCEPTANCE_RULE_STANDARD


async def test_both_doors_give_the_same_answer() -> None:
    """Guards against two validations that drift apart: a seeded answer at temperature 1 is the same text."""
    async with doors("stub:markov", "stub:perfect") as made:
        responses = await generate(made, request("a", max_tokens=24, temperature=1, seed=7))
        body = {"prompt": "a", "max_tokens": 24, "temperature": 1, "seed": 7}
        for speculative in ({}, {"enabled": False}):
            answer = (await made.http.post("/v1/completions", json={**body, "speculative": speculative})).json()
            assert answer["choices"][0]["text"] == "".join(response.text for response in responses)
            assert answer["metrics"]["speculative_decoding"]["rule"] == "coupled"
        assert responses[-1].metrics.rule == common_pb2.ACCEPTANCE_RULE_COUPLED
        other = (await made.http.post("/v1/completions", json={**body, "seed": 8})).json()
        assert other["choices"][0]["text"] != answer["choices"][0]["text"]


async def test_both_doors_take_the_same_parameters() -> None:
    """Guards gRPC against parameters that only HTTP honours: choices, log-probabilities, echo and banned words."""
    async with doors("stub:markov", "stub:perfect") as made:
        fields: dict[str, Any] = {"max_tokens": 16, "temperature": 1, "seed": 7, "n": 2, "logprobs": 2}
        fields |= {"echo": True, "bad_words": ["bc", "f"], "stop": ["tuv"]}
        message = request("ab", **fields)
        body = {"prompt": "ab", **fields, "return_token_ids": True, "return_tokens_as_token_ids": True}
        choices = (await made.http.post("/v1/completions", json=body)).json()["choices"]

        def complete() -> list[Answer]:
            with Client(f"127.0.0.1:{made.port}") as client:
                return client.complete(message)

        answers = await asyncio.to_thread(complete)
        assert len(answers) == len(choices) == 2
        for answer, choice in zip(answers, choices, strict=True):
            assert (answer.text, answer.finish_reason) == (choice["text"], choice["finish_reason"])
            assert answer.token_ids == choice["token_ids"]
            scores = choice["logprobs"]
            assert [*answer.prompt_logprobs, *answer.logprobs] == scores["token_logprobs"][1:]
            shown = [{f"token_id:{token}": value for token, value in tops} for tops in answer.tops]
            assert [set(tops) - set(own) for tops, own in zip(shown, scores["top_logprobs"][3:], strict=True)] == (
                [set()] * len(shown)
            )
            assert "bc" not in answer.text and "f" not in answer.text
        several = coordinator_pb2.GenerateRequest(seed=7, logprobs=0)
        several.prompts.texts.extend(["ab", "c"])
        several.params.max_tokens = 4
        assert {response.choice for response in await generate(made, several)} == {0, 1}


async def test_the_command_line_s_client_reads_it() -> None:
    """Guards `outrider generate` and `outrider demo`: which text each token contributed."""
    async with doors() as made:

        def read() -> tuple[list[Any], Answer]:
            answer = Answer()
            with Client(f"127.0.0.1:{made.port}") as client:
                return list(client.generate(request("hi", max_tokens=64, temperature=0), answer)), answer

        pieces, answer = await asyncio.to_thread(read)
        assert "".join(piece.text for piece in pieces) == answer.text == TEXT
        assert [piece.text for piece in pieces][:7] == ["H", "", "é", "", "", "", "😀"]
        assert answer.finish_reason == "stop"


async def test_a_stop_string_over_two_tokens_ends_both_services_streams() -> None:
    """Guards against back ends that go on to the token limit behind a stop that only the text shows."""
    async with doors() as made:
        message = request("hi", max_tokens=1000, temperature=0)
        message.stop.extend(["the", "zzz"])
        responses = await generate(made, message)
        assert "".join(response.text for response in responses) == "Hé😀 "
        assert responses[-1].completion_tokens == len("Hé😀 the".encode())
        await all_closed(made)


async def test_a_caller_that_goes_away_frees_the_target() -> None:
    """Guards the services' memory against answers that nobody reads."""
    async with doors("stub:markov?fixed_ms=5", None) as made:
        call = made.stub.Generate(request("a", max_tokens=4000))
        assert (await call.read()).token_ids
        assert await open_streams(made) == 1
        call.cancel()
        await all_closed(made)


async def test_the_call_s_deadline_is_the_request_s() -> None:
    """Guards against work for a caller whose time is up, and against `stop` as its reason."""
    async with doors("stub:markov?fixed_ms=20", None) as made:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for response in made.stub.Generate(request("a", max_tokens=4000), timeout=0.5):
                assert response.finish_reason == coordinator_pb2.FINISH_REASON_UNSPECIFIED
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await all_closed(made)


async def test_bad_input_names_its_field_and_the_next_call_works() -> None:
    """Guards against INTERNAL for what a caller may send, over gRPC as over HTTP."""
    empty = coordinator_pb2.GenerateRequest()
    chat = coordinator_pb2.GenerateRequest()
    chat.chat.SetInParent()
    stop = request("a")
    stop.stop.append("")
    bias = request("a")
    bias.params.logit_bias.add(token_id=300, bias=1)
    rule = request("a")
    rule.speculation.rule = 7  # type: ignore[assignment]  # an enumeration is open on the wire
    variables = coordinator_pb2.GenerateRequest()
    variables.chat.messages.add(role="user", content="a")
    variables.chat.variables_json = "[]"
    word = request("a")
    word.params.bad_words.add(ids=[300])
    bad = [
        ("prompt", empty),
        ("variables_json", variables),
        ("bad_words", word),
        ("bad_words", request("a", bad_words=[""])),
        ("logprobs", request("a", logprobs=21)),
        ("n", request("a", n=0)),
        ("chat", chat),
        ("text", request("")),
        ("token_ids", request([])),
        ("token_ids", request([258])),
        ("text", request("x" * 10_000)),
        ("temperature", request("a", temperature=math.nan)),
        ("temperature", request("a", temperature=-1)),
        ("top_p", request("a", top_p=0)),
        ("top_k", request("a", top_k=-2)),
        ("max_tokens", request("a", max_tokens=0)),
        ("num_speculative_tokens", request("a", num_speculative_tokens=99)),
        ("stop", stop),
        ("logit_bias", bias),
        ("rule", rule),
    ]
    async with doors(draft=None) as made:
        for field, message in bad:
            code, details = await refusal(made, message)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, details
            assert details.startswith(field + ": "), details
        assert len(await generate(made, request("a", temperature=0))) > 0
        named = request("a")
        named.model = "another"
        assert (await refusal(made, named))[0] is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (None, None, None)),
        ({"temperature": 0}, (0.0, None, None)),
        ({"temperature": 1, "seed": 0, "max_tokens": 5}, (1.0, 0, 5)),
    ],
)
def test_zero_and_unset_are_told_apart(changes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """Guards against temperature 0 read as the default, and an unset seed read as 0."""
    query = query_from_pb(request("a", **changes), None)
    assert (query.sampling.temperature, query.seed, query.sampling.max_tokens) == expected


async def test_the_door_has_reflection_and_health() -> None:
    """Guards grpcurl and probes."""
    async with doors(draft=None) as made:

        def services() -> list[str]:
            with grpc.insecure_channel(f"127.0.0.1:{made.port}") as channel:
                return list(ProtoReflectionDescriptorDatabase(channel).get_services())

        assert COORDINATOR_SERVICE_NAME in await asyncio.to_thread(services)
        async with channel_to(made.port) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


async def test_a_hundred_bad_requests_do_no_harm() -> None:
    """Guards against leaks: after refused, cut and aborted requests nothing is held anywhere."""
    async with doors() as made:
        calls = [
            made.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": tokens, "stop": stop, "n": n})
            for prompt in ("a", "", [999], [5])
            for tokens in (1, 0, 9, "8", None)
            for stop in (None, "é", "")
            for n in (1, 2)
        ]
        codes = [response.status_code for response in await asyncio.gather(*calls)]
        assert set(codes) == {200, 400}
        await all_closed(made)
        answer = (await made.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 64})).json()
        assert answer["choices"][0]["text"] == TEXT


async def test_a_prompts_alternatives_are_as_many_as_were_asked_for() -> None:
    """Guards clients that cut the flat list by the number they asked for: an echo may need more for itself."""
    async with doors("stub:markov", "stub:perfect") as made:
        fields: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 3, "prompt_logprobs": 1}
        first, *_ = await generate(made, request("abcd", **fields))
        assert 3 <= len(first.prompt_logprobs.logprobs) == len(first.prompt_logprobs.top_ids)
        assert len(first.logprobs.top_ids) == 3 * len(first.token_ids)
