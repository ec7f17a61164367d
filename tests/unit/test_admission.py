"""Whose turn it is, who is refused, and that nobody stays in a queue who has gone."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter, deque
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from hashlib import sha256
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import front as front_module
from coordinator.admission import Admission
from coordinator.api_keys import ApiKey, ApiKeys
from coordinator.app import build_app
from coordinator.fair_queue import FairQueue
from coordinator.front import FrontConfig
from outrider.errors import DeadlineExceeded, Overloaded, Unavailable
from tests.scripted_decoder import MODEL, ScriptedDecoder, part_info, running_front

# ---- the queue by itself, on a simulated clock ----


def waits(arrivals: list[tuple[float, str, str]], service_s: float = 1.0) -> list[tuple[str, float]]:
    """One place, served in turn: who waited how long.

    Args:
        arrivals: time, who it is, and which line of the queue it stands in.
    """
    queue, coming = FairQueue[tuple[float, str]](), deque(sorted(arrivals))
    now, waited = 0.0, list[tuple[str, float]]()
    while coming or queue:
        if not queue:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            at, who, line = coming.popleft()
            queue.put(line, 1, (at, who))
        at, who = queue.take().item
        waited.append((who, now - at))
        now += service_s
    return waited


def test_a_key_with_a_thousand_requests_delays_another_by_one_slot() -> None:
    """The promise to every client; a single queue, the planted fault, breaks it by hundreds of slots."""
    rng = random.Random(3)
    flood = [(0.0, "flood")] * 1_000
    few = [(at + rng.random(), "few") for at in range(0, 400, 4)]
    fair = waits([(at, who, who) for at, who in flood + few])
    assert len(fair) == 1_100
    assert max(waited for who, waited in fair if who == "few") <= 1.0
    unfair = waits([(at, who, "all") for at, who in flood + few])
    assert max(waited for who, waited in unfair if who == "few") > 500


def test_a_client_that_comes_back_gets_no_more_than_its_turn() -> None:
    """Guards against credit for time in which a client asked for nothing."""
    fair = waits([(0.0, "a", "a")] * 50 + [(20.0, "b", "b")] * 50)
    order = [who for who, _ in fair]
    assert Counter(order[20:60]) == {"a": 20, "b": 20}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 16), st.sampled_from("ppptr")), max_size=120),
    st.randoms(use_true_random=False),
)
def test_entries_are_taken_once_in_order_and_in_equal_shares(
    steps: list[tuple[str, int, str]], rng: random.Random
) -> None:
    """Puts, takes and removals at random: nothing lost or doubled, no client ahead by more than an entry of each."""
    queue, waiting, number = FairQueue[int](), list[Any](), 0
    for client, size, action in steps:
        if action == "p":
            number += 1
            waiting.append(queue.put(client, size, number))
        elif waiting and action == "r":
            queue.remove(waiting.pop(rng.randrange(len(waiting))))
        elif waiting:
            taken = queue.take()
            assert taken is next(entry for entry in waiting if entry.client == taken.client)
            waiting.remove(taken)
        assert queue.size == sum(entry.size for entry in waiting)
        assert all(queue.size_of(c) == sum(e.size for e in waiting if e.client == c) for c in "abcd")
        assert bool(queue) == bool(waiting)
    got, backlog = Counter[str](), Counter(entry.client for entry in waiting)
    largest = {c: max((e.size for e in waiting if e.client == c), default=0) for c in "abcd"}
    # What was taken before may have left a client ahead by one entry, of up to 16.
    while len(backlog) > 1 and min(backlog.values()) > 1:
        taken = queue.take()
        got[taken.client] += taken.size
        backlog[taken.client] -= 1
        clients = list(backlog)
        assert all(got[one] - got[other] <= largest[one] + largest[other] + 16 for one in clients for other in clients)


# ---- admission ----


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def holding(admission: Admission, client: str, count: int) -> Any:
    """`count` requests of one place each, running or waiting; cancelled at the end."""

    async def hold() -> None:
        async with admission.slots(client, 1, 60):
            await asyncio.Event().wait()

    tasks = [asyncio.ensure_future(hold()) for _ in range(count)]
    await settle()
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_full_queue_refuses_its_own_client_only() -> None:
    """One key's flood must not use up the room of the others."""
    admission = Admission(2, 4)
    async with holding(admission, "a", 6):
        assert (admission.running, admission.waiting) == (2, 4)
        with pytest.raises(Overloaded, match=r"4 of the API key 'a' are waiting of at most 4"):
            async with admission.slots("a", 1, 60):
                pytest.fail("came in")
        async with holding(admission, "b", 1):
            assert admission.waiting == 5
        assert admission.waiting == 4
    assert (admission.running, admission.waiting) == (0, 0)
    assert await admission.drain(1)


async def test_who_gives_up_or_runs_out_of_time_leaves_the_queue() -> None:
    """Guards places that nobody would ever give back, and a large request that blocks the others after its end."""
    admission = Admission(2, 8)
    async with holding(admission, "a", 1):
        with pytest.raises(DeadlineExceeded, match=r"0\.02 s"):
            async with admission.slots("b", 2, 0.02):
                pytest.fail("came in")
        assert admission.waiting == 0
        async with holding(admission, "c", 1):
            assert admission.running == 2
        async with AsyncExitStack() as stack:
            large = asyncio.ensure_future(stack.enter_async_context(admission.slots("b", 2, 60)))
            await settle()
            async with holding(admission, "c", 1):
                assert (admission.running, admission.waiting) == (1, 3)  # it does not pass the large one by
                large.cancel()
                with suppress(asyncio.CancelledError):
                    await large
                assert (admission.running, admission.waiting) == (2, 0)


async def test_a_large_request_is_not_passed_by_for_ever() -> None:
    """Guards against starvation: one that wants all places gets them, and one that wants more gets all there are."""
    admission = Admission(2, 8)
    async with holding(admission, "a", 2) as running:
        entering = asyncio.ensure_future(admission.slots("b", 5, 60).__aenter__())
        await settle()
        async with holding(admission, "a", 3):
            running[0].cancel()
            await settle()
            assert (admission.running, admission.waiting) == (1, 5)
            running[1].cancel()
            await entering
            assert (admission.running, admission.waiting) == (2, 3)


async def test_places_follow_the_targets() -> None:
    """More let those in who wait; fewer end nobody, and nobody comes in until there is room."""
    admission = Admission(1, 8)
    async with holding(admission, "a", 5) as tasks:
        admission.resize(3, 24)
        await settle()
        assert (admission.running, admission.waiting) == (3, 2)
        admission.resize(1, 8)
        tasks[0].cancel()
        tasks[1].cancel()
        await settle()
        assert (admission.running, admission.waiting) == (1, 2)


async def test_retry_after_is_the_time_in_which_a_place_comes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is told to come back each second, for as long as an answer takes, only makes the load worse."""
    now = [0.0]
    monkeypatch.setattr("coordinator.admission.time.monotonic", lambda: now[0])
    admission = Admission(1, 4)

    async def retry_after_s(client: str) -> float:
        with pytest.raises(Overloaded) as raised:
            admission.check(client, 1)
        return raised.value.retry_after_s

    async with holding(admission, "a", 5) as tasks:
        assert await retry_after_s("a") == 1  # nothing is known yet
        for end in (10.0, 14.0):
            now[0] = end
            tasks.pop(0).cancel()
            await settle()
        async with holding(admission, "a", 2):
            assert await retry_after_s("a") == 4
            async with holding(admission, "b", 4):
                assert await retry_after_s("a") == 8  # every second place is b's
        now[0] = 10_000.0
        for task in tasks:
            task.cancel()
        await settle()
    now[0] = 20_000.0
    async with holding(admission, "a", 5):
        assert await retry_after_s("a") <= 60


# ---- at the door ----

KEYS = ApiKeys(fixed=tuple(ApiKey(name, sha256(name.encode()).digest()) for name in ("a", "b")))
GOOD = {"model": MODEL, "prompt": "hi", "max_tokens": 2}


@asynccontextmanager
async def door(decoder: ScriptedDecoder, **config: Any) -> Any:
    async with running_front(decoder, FrontConfig(api_keys=KEYS, **config)) as front:
        transport = httpx.ASGITransport(build_app(lambda: front))
        async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:

            def ask(key: str, **fields: Any) -> asyncio.Future[httpx.Response]:
                headers = {"authorization": f"Bearer {key}"}
                return asyncio.ensure_future(client.post("/v1/completions", json={**GOOD, **fields}, headers=headers))

            yield front, ask


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_keys_take_turns_and_a_full_key_gets_429_at_once() -> None:
    """Guards the whole way from the header to the decoder."""
    decoder = ScriptedDecoder()
    decoder.gate = asyncio.Event()
    async with door(decoder, max_num_seqs=1, queue_factor=8) as (front, ask):
        flood = [ask("a", prompt="aaaa") for _ in range(20)]
        await until(lambda: front._admission.waiting == 8 and sum(task.done() for task in flood) == 11)
        refused = [task.result() for task in flood if task.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert "API key 'a'" in refused[0].json()["error"]["message"]
        other = ask("b", prompt="b")
        await until(lambda: front._admission.waiting == 9)
        decoder.gate.set()
        answers = await asyncio.gather(other, *flood)
        assert Counter(answer.status_code for answer in answers) == {200: 10, 429: 11}
        lengths = [len(stream.request.prompt_ids) for stream in decoder.streams]
        assert lengths.index(2) == 1  # behind the one that ran already


async def test_tokenising_is_bounded_and_a_thread_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of long prompts must not pile up before admission, nor by giving up and coming again."""
    go, at_work = threading.Event(), []
    real = front_module.prepare

    def slow(*arguments: Any) -> Any:
        at_work.append(1)
        assert go.wait(10)
        return real(*arguments)

    monkeypatch.setattr(front_module, "prepare", slow)
    async with door(ScriptedDecoder(), max_num_seqs=1, queue_factor=5) as (front, ask):
        flood = [ask("a") for _ in range(20)]
        await until(lambda: len(at_work) == 4 and sum(task.done() for task in flood) == 11)
        assert {task.result().status_code for task in flood if task.done()} == {429}
        for task in flood:
            task.cancel()
        await settle()
        late = ask("b")
        await asyncio.sleep(0.02)
        assert len(at_work) == 4
        go.set()
        assert (await late).status_code == 200
        await until(lambda: not front._preparing.running)


async def test_admission_takes_what_all_targets_take_together() -> None:
    """Guards the second target's places, which one target's number would leave idle."""
    decoder = ScriptedDecoder()
    decoder.target = part_info(max_num_seqs=4)
    decoder.more_seqs = 6
    decoder.gate = asyncio.Event()
    async with door(decoder) as (front, ask):
        assert front.places == 10
        asked = [ask("a") for _ in range(12)]
        await until(lambda: front._admission.running == 10 and front._admission.waiting == 2)
        decoder.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


async def test_a_blocked_event_loop_shows_in_its_metric() -> None:
    """Guards the figure by which a busy coordinator is known."""
    async with door(ScriptedDecoder()) as (front, _):

        def slower_than(bound: str) -> float:
            samples = {sample.labels.get("le"): sample.value for sample in front.metrics.loop_lag.collect()[0].samples}
            return float(samples["+Inf"] - samples[bound])

        await asyncio.sleep(0.06)  # so that it waits for its next turn
        before = slower_than("0.1")
        time.sleep(0.2)  # noqa: ASYNC251 - what must never happen
        await until(lambda: slower_than("0.1") > before)


async def test_what_waits_is_told_when_the_server_closes() -> None:
    """Guards waiting clients against a place in a server that has ended, and against a torn connection."""
    admission = Admission(1, 4)
    async with holding(admission, "a", 1), holding(admission, "b", 3) as waiting:
        assert (admission.running, admission.waiting) == (1, 3)
        waiting[0].cancel()
        admission.close()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in ended] == [asyncio.CancelledError, Unavailable, Unavailable]
        assert (admission.running, admission.waiting) == (1, 0)
        with pytest.raises(Unavailable):
            admission.check("a", 1)
    assert await admission.drain(60)
    assert admission.running == 0


async def test_a_drain_can_be_cut_short() -> None:
    """Guards the second signal: what runs and what waits is counted, and who waits is told."""
    decoder = ScriptedDecoder()
    decoder.gate = asyncio.Event()
    async with door(decoder, max_num_seqs=1) as (front, ask):
        asked = [ask("a"), ask("b")]
        await until(lambda: len(decoder.streams) == 1 and front._admission.waiting == 1)
        draining = asyncio.ensure_future(front.drain(600))
        await settle()
        assert not draining.done()
        front.hurry()
        assert await draining == 2
        await front.close()
        decoder.gate.set()
        assert sorted(answer.status_code for answer in await asyncio.gather(*asked)) == [200, 503]
    assert len(decoder.streams) == 1


async def test_a_draining_server_refuses_before_it_tokenises() -> None:
    admission = Admission(1, 1)
    await admission.drain(0)
    with pytest.raises(Unavailable):
        admission.check("", 1)
