"""The load test against a scripted server: it is right where public tools were wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from typer.testing import CliRunner

from loadtest import arrivals, slo
from loadtest.client import Client, Endpoint, base, stopwatch
from loadtest.compare import Arm, CompareOptions, compare
from loadtest.guard import Guard
from loadtest.loop import Call, Run, drive
from loadtest.outcome import Outcome, Piece
from loadtest.prompts import Prompt, PromptPool, PromptSet, lengthened, load
from loadtest.series import parse
from loadtest.serve import ServeOptions, serve
from loadtest.spread import generate, join, split
from loadtest.sse import EventParser
from loadtest.summary import summarise
from loadtest.workload import Load, Sampling
from outrider.cli import app
from outrider.errors import InvalidArgument, Unavailable
from tests.unit.fake_openai import END, FakeServer, Request, failing, frame, serving, usage


def endpoint(fake: FakeServer, timeout_s: float = 20.0) -> Endpoint:
    return Endpoint(url=fake.url, door="completions", model="m", timeout_s=timeout_s)


async def one(fake: FakeServer, timeout_s: float = 20.0, *, stream: bool = True) -> Outcome:
    """A single request."""
    place = endpoint(fake, timeout_s)
    async with Client(place, connections=1) as client:
        body = place.body("hello", stream=stream, each_usage=False, fields={"max_tokens": 16})
        return await client.send(body, task="t", planned_s=0.0, clock=stopwatch())


def pool(count: int = 500) -> PromptPool:
    return PromptPool(PromptSet("numbers", tuple(Prompt(f"prompt {n}", "t") for n in range(count))), seed=0)


def options(**fields: Any) -> ServeOptions:
    own = {name: fields.pop(name) for name in list(fields) if name in ServeOptions.__dataclass_fields__}
    return ServeOptions(load=Load(**{"num_prompts": 8, **fields}), sampling=Sampling(), **{"warmups": 0, **own})


def outcome(**fields: Any) -> Outcome:
    return Outcome(**{"task": "t", "planned_s": 0.0, "sent_s": 0.0, "end_s": 1.0, "output_tokens": 5, **fields})


async def answered(request: Request) -> None:
    await request.answer()


class TestFrames:
    """What arrives is bytes, not events."""

    STREAM = (
        b': hello\r\n\r\ndata: {"a": "\xc3\xa4"}\r\n\r\nevent: x\ndata: one\ndata: two\n\ndata:last\r\rdata: [DONE]'
    )
    EVENTS = ('{"a": "ä"}', "one\ntwo", "last", "[DONE]")

    @pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
    def test_cuts_change_nothing(self, size: int) -> None:
        """Guards against a read taken for an event: cut lines, characters, CR LF pairs; no blank line at the end."""
        parser, found = EventParser(), []
        for start in range(0, len(self.STREAM), size):
            found += parser.feed(self.STREAM[start : start + size])
        assert (*found, *parser.finish()) == self.EVENTS

    async def test_a_stream_cut_into_bytes_gives_the_same_answer(self) -> None:
        """Guards the client against servers and proxies that split or join frames, inside a character too."""
        whole = frame("grün", 3) + frame("er", 4, finish_reason="stop") + usage(4) + END

        async def bytewise(request: Request) -> None:
            for byte in whole.replace(b"\n\n", b"\r\n\r\n"):
                await request.send(bytes([byte]))
                await asyncio.sleep(0)

        async def at_once(request: Request) -> None:
            await request.send(b": ping\n\n" + whole.removesuffix(b"\n\n"))

        for script in (bytewise, at_once):
            async with serving(script) as fake:
                got = await one(fake)
            assert (got.failure, got.output_tokens, [piece.tokens for piece in got.pieces]) == (None, 4, [3, 4]), got


class TestTokensAndTimes:
    async def test_tokens_come_from_usage_and_running_totals_are_not_added(self) -> None:
        """Guards against counting chunks, or summing usage that grows with each of them."""

        async def script(request: Request) -> None:
            await request.send(frame("several tokens at once", 6), frame("!", 10, finish_reason="stop"), usage(10), END)

        async with serving(script) as fake:
            assert (await one(fake)).output_tokens == 10

    async def test_an_early_end_counts_what_was_written(self) -> None:
        """Guards throughput against `max_tokens` taken for the answer's length."""

        async def script(request: Request) -> None:
            await request.answer(tokens=7)

        async with serving(script) as fake:
            result = await serve(endpoint(fake), pool(), options(num_prompts=3))
        assert result["total_output_tokens"] == 21

    async def test_the_role_chunk_is_no_token(self) -> None:
        """Guards TTFT against the empty first chunk of a chat, and against the last one."""

        async def script(request: Request) -> None:
            await request.send(frame("", delta={"role": "assistant", "content": ""}), frame(""))
            await asyncio.sleep(0.15)
            await request.send(frame("x"))
            await asyncio.sleep(0.15)
            await request.send(frame("y", finish_reason="stop"), usage(2), END)

        async with serving(script) as fake:
            got = await one(fake)
        assert got.ttft_s is not None and 0.14 < got.ttft_s < got.e2el_s - 0.14

    async def test_a_whole_answer_has_no_first_token(self) -> None:
        """Guards against a TTFT that is the total time, where nothing streams."""

        async def script(request: Request) -> None:
            body = {
                "choices": [{"text": "hi", "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 2},
            }
            await request.send(json.dumps(body).encode())

        async with serving(script) as fake:
            got = await one(fake, stream=False)
        assert (got.failure, got.ttft_s, got.tpot_s, got.output_tokens) == (None, None, None, 2)

    async def test_latency_counts_from_the_planned_time(self) -> None:
        """Guards against coordinated omission: while a server stalls, the requests behind it wait, and it shows."""
        numbers = itertools.count()

        async def script(request: Request) -> None:
            if next(numbers) == 0:
                await asyncio.sleep(0.5)
            await request.answer()

        async with serving(script) as fake:
            planned = [Call({"prompt": "p", "stream": True}, "t", 0.02 * index) for index in range(10)]
            async with Client(endpoint(fake), connections=1) as client:
                outcomes, _ = await drive(client, planned, Guard(0.05), max_concurrency=1)
        waits = [got.ttft_s or 0.0 for got in outcomes]
        assert all(wait > 0.3 for wait in waits[:9]), waits
        assert all(got.end_s - got.sent_s < 0.3 for got in outcomes[1:])

    async def test_the_planned_rate_is_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Guards against gaps slept one after the other: what each oversleeps would add up to a lower rate."""
        sleep = asyncio.sleep
        monkeypatch.setattr("loadtest.loop.asyncio.sleep", lambda wanted_s: sleep(wanted_s + 0.05 * (wanted_s > 0)))
        planned = [Call({"prompt": "p", "stream": True}, "t", index / 20) for index in range(40)]
        async with serving(answered) as fake, Client(endpoint(fake), connections=40) as client:
            outcomes, _ = await drive(client, planned, Guard(0.05), max_concurrency=None)
        delays = sorted((one.planned_s, one.sent_s - one.planned_s) for one in outcomes)
        assert len(delays) == 40 and min(delay for _, delay in delays) >= 0
        # Every sleep is 50 ms too long, which would add up to 2 s. A busy machine may be late, but it catches up again.
        assert min(delay for _, delay in delays[-10:]) < 1.0

    async def test_more_than_a_hundred_connections(self) -> None:
        """Guards against the HTTP library's own limit, which would queue what the server should see."""
        arrived = 0
        everybody = asyncio.Event()

        async def script(request: Request) -> None:
            nonlocal arrived
            arrived += 1
            if arrived == 150:
                everybody.set()
            await asyncio.wait_for(everybody.wait(), 15)
            await request.answer()

        async with serving(script) as fake:
            result = await serve(endpoint(fake), pool(), options(num_prompts=150, max_concurrency=150))
        assert (result["completed"], fake.most_under_way) == (150, 150)


class TestFailures:
    async def test_failures_by_class(self) -> None:
        """Guards against failures that count as fast answers; each has its class, and what the server said."""

        async def cut(request: Request) -> None:
            await request.send(frame("x", 1))

        async def error_event(request: Request) -> None:
            await request.send(frame("x"), b'data: {"error": {"message": "draft on fire"}}\n\n', END)

        async def malformed(request: Request) -> None:
            await request.send(b"data: {oops\n\n")

        async def empty(request: Request) -> None:
            await request.send(frame("", finish_reason="stop"), usage(0), END)

        async def uncounted(request: Request) -> None:
            await request.send(frame("x", finish_reason="stop"), END)

        async def slow(request: Request) -> None:
            await asyncio.sleep(1)

        async def reset(request: Request) -> None:
            await request.send(frame("x"))
            assert request.http.transport is not None
            request.http.transport.abort()

        expected = {
            "cut": cut,
            "error_event": error_event,
            "malformed": malformed,
            "empty": empty,
            "no_usage": uncounted,
            "timeout": slow,
            "http_429": failing(429, "full"),
        }
        for name, script in [*expected.items(), ("cut", reset)]:
            async with serving(script) as fake:
                got = await one(fake, timeout_s=0.3 if name == "timeout" else 20.0)
            assert got.failure == name, (name, got)
            if name in ("error_event", "http_429"):
                assert got.detail in ("draft on fire", "full")
        nobody = Endpoint(url="http://127.0.0.1:9", door="completions", model="m")
        async with Client(nobody, connections=1) as client:
            got = await client.send({}, task="t", planned_s=0.0, clock=stopwatch())
        assert got.failure == "connect"

    async def test_a_run_stops_when_too_much_fails(self) -> None:
        """Guards against a table of figures from a server that refuses; 5 % is the limit, and the reason is said."""
        async with serving(failing(503, "draining")) as fake:
            result = await serve(endpoint(fake), pool(), options(num_prompts=200, max_concurrency=2))
        assert result["failed"] < 10 and result["completed"] == 0
        assert "http_503" in result["stopped"] and "draining" in result["stopped"]
        assert result["mean_ttft_ms"] is None
        json.dumps(result, allow_nan=False)

    async def test_failures_have_no_latency(self) -> None:
        """Guards latencies and throughput against answers that failed."""
        numbers = itertools.count()

        async def script(request: Request) -> None:
            if next(numbers) == 3:
                await asyncio.sleep(0.4)
                await request.send(frame("x", 1))
            else:
                await request.answer()

        async with serving(script) as fake:
            result = await serve(endpoint(fake), pool(), options(num_prompts=8))
        assert (result["failures"], result["completed"], result["total_output_tokens"]) == ({"cut": 1}, 7, 28)
        assert result["p99_e2el_ms"] < 390

    async def test_a_busy_server_is_refused(self) -> None:
        """Guards against measuring somebody else's requests."""
        async with serving(answered) as fake:
            fake.metrics = fake.metrics.replace("running 0", "running 3")
            with pytest.raises(Unavailable, match="3 other requests"):
                await serve(endpoint(fake), pool(), options())
            assert not fake.bodies
            assert (await serve(endpoint(fake), pool(), options(allow_busy=True)))["completed"] == 8


class TestSummary:
    def test_nothing_measured_is_not_a_number(self) -> None:
        """Guards against NaN, infinities and percentiles of nothing."""
        for outcomes in ([], [outcome(failure="cut")]):
            figures = summarise(Run(outcomes, 0.0), planned=1)
            assert figures["output_throughput"] is None and figures["p99_tpot_ms"] is None
            json.dumps(figures, allow_nan=False)

    def test_vllm_keys(self) -> None:
        """Guards programs that read the results of `vllm bench serve`."""
        pieces = (Piece(0.5, 1), Piece(0.7, 3), Piece(0.9, 5))
        figures = summarise(Run([outcome(first_s=0.5, pieces=pieces)], 2.0), planned=1, goodput_ms={"ttft": 600})
        assert figures["output_throughput"] == 2.5 and figures["request_goodput"] == 0.5
        assert (figures["mean_ttft_ms"], figures["median_tpot_ms"]) == (500.0, pytest.approx(100.0))
        assert figures["mean_itl_ms"] == pytest.approx(200.0) and figures["p99_e2el_ms"] == 1000.0

    def test_a_collected_stream_is_said_so(self) -> None:
        """Guards against millions of tokens a second where a proxy collects the answer."""
        at_once = outcome(first_s=0.9, pieces=(Piece(0.9, 1), Piece(0.9, 5)))
        figures = summarise(Run([at_once], 1.0), planned=1)
        assert figures["answers_arrive_whole"] and figures["mean_tpot_ms"] is None

    def test_goodput(self) -> None:
        """Guards the limits: all must hold, and only known ones are taken."""
        limits = slo.parse(["ttft:200", "tpot:50"])
        fast = outcome(first_s=0.1, pieces=(Piece(0.1, 1), Piece(0.2, 5)))
        slow = outcome(first_s=0.1, pieces=(Piece(0.1, 1), Piece(0.5, 5)))
        late = outcome(first_s=0.3, pieces=(Piece(0.3, 1), Piece(0.4, 5)))
        assert [slo.is_good(one, limits) for one in (fast, slow, late, outcome(failure="cut"))] == [
            True,
            False,
            False,
            False,
        ]
        with pytest.raises(InvalidArgument, match="goodput"):
            slo.parse(["itl:5"])

    def test_acceptance_from_the_responses(self) -> None:
        """Guards the per-position rates: raw counts are added first and divided last."""
        report = {"num_spec_steps": 4, "num_draft_tokens": 8, "num_accepted_draft_tokens": 5}
        first = outcome(speculation={**report, "acceptance_histogram": [1, 1, 2]})
        second = outcome(speculation={**report, "num_accepted_draft_tokens": 0, "acceptance_histogram": [4]})
        figures = summarise(Run([first, second], 1.0), planned=2)
        assert figures["spec_decode_per_position_acceptance_rates"] == [0.375, 0.25]
        assert figures["spec_decode_acceptance_rate"] == 0.3125
        assert figures["spec_decode_acceptance_length"] == 1.625


class TestWorkload:
    async def test_no_prompt_is_sent_twice(self) -> None:
        """Guards against caches that make the second half of a run look fast; the warm-up has its own prompts."""
        async with serving(answered) as fake:
            result = await serve(endpoint(fake), pool(5), options(num_prompts=12, warmups=2))
        assert len(set(fake.prompts)) == 14
        assert result["numbered_prompts"] == 9

    def test_arms_can_share_questions(self) -> None:
        """Guards comparisons: the same prompts for two arms, but no text twice, unless repeats are asked for."""
        shared = pool(3)
        taken = shared.take(2)
        first, second = shared.fresh(taken), shared.fresh(taken)
        assert [prompt.text for prompt in first] == [prompt.text for prompt in taken]
        assert all(
            text.text.endswith(own.text) and text.text != own.text for text, own in zip(second, taken, strict=True)
        )
        repeating = PromptPool(shared.source, seed=0, allow_repeat=True)
        assert repeating.fresh(taken) == repeating.fresh(taken) == taken

    def test_formats(self, tmp_path: Any) -> None:
        """Guards the four file formats, and the message for what is none of them."""
        spec = tmp_path / "spec.jsonl"
        spec.write_text('{"category": "writing", "turns": ["Write.", "More."]}\n{"prompt": "p", "output_tokens": 9}\n')
        assert load("auto", spec).prompts == (Prompt("Write.", "chat"), Prompt("p", "all", 9))
        share = tmp_path / "share.json"
        share.write_text(
            json.dumps([{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}])
        )
        assert load("auto", share).prompts == (Prompt("Hi", "sharegpt"),)
        text = tmp_path / "lines.txt"
        text.write_text("one\n\ntwo\n")
        assert [prompt.text for prompt in load("auto", text).prompts] == ["one", "two"]
        assert len(load("builtin", None).prompts) == 40
        assert load("random", None, random_words=3).random
        spec.write_text('{"question": 1}\n')
        with pytest.raises(InvalidArgument, match="line 1"):
            load("auto", spec)

    def test_context_is_filled_from_other_prompts(self) -> None:
        """Guards the context of a cell: the question stays whole at the end."""
        made = lengthened(Prompt("Why?", "t"), [Prompt("a passage", "t")] * 3, 200)
        assert len(made.text) == 200 and made.text.endswith("\n\nWhy?")
        assert lengthened(Prompt("a long question", "t"), (), 8).text == "question"

    def test_arrivals(self, tmp_path: Any) -> None:
        """Guards the laws of arrival: mean rate, burstiness, even spacing, replay."""
        rng = np.random.default_rng(0)
        times = arrivals.poisson(20_000, 50.0, 1.0, rng)
        gaps = np.diff(times)
        assert gaps.mean() == pytest.approx(0.02, rel=0.03) and gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
        even = np.diff(arrivals.poisson(20_000, 50.0, 4.0, rng))
        assert even.std() == pytest.approx(even.mean() / 2, rel=0.05)
        assert arrivals.poisson(3, float("inf"), 1.0, rng) == [0.0, 0.0, 0.0]
        assert arrivals.constant(3, 2.0) == [0.0, 0.5, 1.0]
        file = tmp_path / "trace.jsonl"
        file.write_text('{"timestamp": 12.5, "output_length": 7}\n{"timestamp": 10.0}\n')
        assert arrivals.trace(file) == [(0.0, None), (2.5, 7)]
        file.write_text('{"time": 1}\n')
        with pytest.raises(InvalidArgument, match="line 1"):
            arrivals.trace(file)

    @pytest.mark.parametrize(
        "bad",
        [{"num_prompts": 0}, {"max_concurrency": 0}, {"request_rate": 0.0}, {"request_rate": 1.0, "burstiness": 0.0}],
    )
    def test_absurd_loads_are_refused(self, bad: dict[str, Any]) -> None:
        """Guards against results of nothing."""
        with pytest.raises(InvalidArgument):
            Load(**{"num_prompts": 1, **bad}).plan(np.random.default_rng(0))

    def test_series(self) -> None:
        """Guards the reading of the server's own counts."""
        before = parse('outrider:step_seconds_sum{side="target",stage="total"} 1\n')
        after = parse('outrider:step_seconds_sum{side="target",stage="total"} 3\nvllm:num_requests_running 2\n').since(
            before
        )
        assert after.value("step_seconds_sum", side="target") == 2.0 and after.value("num_requests_running") == 2.0

    def test_urls(self) -> None:
        """Guards both ways to write a server's address."""
        assert base("http://h:1/v1/") == base("http://h:1") == "http://h:1"
        with pytest.raises(InvalidArgument, match="url"):
            base("h:1")


class TestCompare:
    async def test_arms_get_the_same_questions_and_a_refusal_is_a_result(self) -> None:
        """Guards comparisons: same prompts at both servers, the ratio per round, and an arm that refuses is named."""

        async def slow(request: Request) -> None:
            await request.answer(tokens=4, gap_s=0.02)

        async with serving(slow) as first, serving(answered) as second, serving(failing(501, "no greedy")) as third:
            arms = [
                Arm(name, fake.url, endpoint=endpoint(fake))
                for name, fake in (("a", first), ("b", second), ("c", third))
            ]
            chosen = CompareOptions(
                baseline="a", load=Load(num_prompts=10), sampling=Sampling(ignore_eos=True), rounds=3
            )
            result = await compare(arms, pool(), chosen)
        assert sorted(first.prompts) == sorted(second.prompts) and len(set(first.prompts)) == 31
        assert result["arms"]["b"]["ratio_to_baseline"] > 1.5 and len(result["arms"]["b"]["ratios_by_round"]) == 3
        assert "no greedy" in result["arms"]["c"]["refused"] and len(third.bodies) < 10
        assert result["same_output_lengths"]

    async def test_two_arms_of_one_server(self) -> None:
        """Guards arms that differ in a body field only: no text is sent twice to their server."""
        async with serving(answered) as fake:
            arms = [Arm("on", fake.url, {"mark": 1}, endpoint(fake)), Arm("off", fake.url, {"mark": 2}, endpoint(fake))]
            chosen = CompareOptions(baseline="off", load=Load(num_prompts=5), sampling=Sampling(), rounds=2)
            await compare(arms, pool(), chosen)
            with pytest.raises(InvalidArgument, match="baseline"):
                await compare(arms, pool(), CompareOptions(baseline="x", load=Load(num_prompts=1), sampling=Sampling()))
        assert len(set(fake.prompts)) == len(fake.bodies) == 22
        assert sorted(body["mark"] for body in fake.bodies) == [1] * 11 + [2] * 11


class TestSpread:
    async def test_generators_share_a_run(self) -> None:
        """Guards a load from several nodes: nothing is sent twice or lost, planned times stay, lanes add up."""
        planned = [Call({"prompt": f"p{n}", "stream": True}, "t", 0.01 * n) for n in range(25)]
        shares = split(planned, 3, 7)
        assert sorted(call.planned_s or 0.0 for share in shares for call in share.calls) == [
            c.planned_s for c in planned
        ]
        assert [share.max_concurrency for share in shares] == [3, 2, 2]
        async with serving(answered) as fake:
            at = time.time() + 0.5
            work = (asyncio.to_thread(generate, endpoint(fake), share, 0.05, at) for share in shares)
            run, stopped = join(await asyncio.gather(*work))
        assert sorted(fake.prompts) == sorted(f"p{n}" for n in range(25)) and stopped is None
        assert len(run.outcomes) == 25 and 0.2 < run.seconds < 5
        assert all(0 <= one.sent_s - one.planned_s < 0.5 for one in run.outcomes)

    def test_more_generators_than_lanes_are_refused(self) -> None:
        """Guards against a generator that may send nothing."""
        for generators, lanes in ((3, 2), (0, None), (9, None)):
            with pytest.raises(InvalidArgument, match="generators"):
                split([Call({}, "t")] * 8, generators, lanes)


async def test_whatever_a_server_says_is_an_outcome() -> None:
    """Guards a run against a proxy's page in another encoding, and the server's own words in an odd error."""

    async def page(request: Request) -> None:
        request.response = web.Response(body="d\u00e9faut".encode("latin-1"), status=502, content_type="text/html")

    page.prepares = True  # type: ignore[attr-defined]

    async def odd(request: Request) -> None:
        await request.send(b'data: {"error": "out of memory"}\n\n')

    for script, failure, said in ((page, "http_502", "faut"), (odd, "error_event", "out of memory")):
        async with serving(script) as fake:
            endpoint = Endpoint(url=fake.url, door="completions", model="m")
            async with Client(endpoint, connections=1) as client:
                body = endpoint.body("q", stream=True, each_usage=False, fields={})
                outcome = await client.send(body, task="t", planned_s=0.0, clock=stopwatch())
        assert outcome.failure == failure and said in outcome.detail


@pytest.mark.parametrize("flag", [("--request-timeout", "0"), ("--request-timeout", "nan"), ("--num-warmups", "-1")])
def test_a_limit_that_would_mean_none_is_refused(flag: tuple[str, str]) -> None:
    """Guards against a bench that waits for ever because it was told to wait for no time."""
    done = CliRunner().invoke(app, ["bench", "serve", "--url", "http://127.0.0.1:9", *flag])
    said = str(done.exception) if isinstance(done.exception, InvalidArgument) else done.output
    assert done.exit_code != 0 and flag[0].lstrip("-") in said
