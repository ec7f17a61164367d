"""The decoder between two links that are never connected: what it posts for what the services' messages say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from coordinator.decoder import Decoder, DecoderConfig, DecodingRequest
from coordinator.link import Link
from coordinator.parts import TargetFiles
from coordinator.rows import ProposeRow, VerifyRow, propose_batch, verify_batch
from coordinator.state import Outstanding, Phase
from coordinator.streams import Stream
from coordinator.target_side import MAX_REFUSALS
from outrider.errors import InvalidArgument, OutriderError, Status, Unavailable
from outrider.sampling import Form, SamplingParams
from outrider.seam import ProposalBatch, Replies, Slots, VerdictBatch
from tests.scripted_decoder import part_info
from tests.unit.pure_services import TableDraft, TableTarget

TABLE = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.3, 0.4, 0.3]])
INFO = part_info(max_slots=8, max_num_seqs=8, max_model_len=4_096, features=None)


class Sent:
    """A decoder whose messages are taken out of the links' outboxes by hand."""

    def __init__(self, **fields: Any) -> None:
        self.decoder = Decoder(DecoderConfig(target=("one", "two"), draft="draft", **fields))
        self.decoder._loop = asyncio.get_running_loop()
        self.decoder._target.files = TargetFiles({}, INFO)
        self.target, self.other = self.decoder._target.links
        assert self.decoder._draft.link is not None
        self.draft = self.decoder._draft.link
        for link in (self.target, self.draft):
            self.bring_up(link)

    @staticmethod
    def bring_up(link: Link[Any, Any]) -> None:
        link.is_up, link.info, link._outbox.seats = True, INFO, 64

    def open(self, *, prompt: int = 1, max_tokens: int = 100) -> Stream:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return self.decoder.open(DecodingRequest(prompt_ids=(1,) * prompt, params=params))

    def rows(self, link: Link[Any, Any]) -> list[Any]:
        """What leaves now."""
        return link._outbox.collect()[0]

    def to_draft(self) -> list[ProposeRow]:
        return self.rows(self.draft)

    def to_target(self) -> list[VerifyRow]:
        return self.rows(self.target)

    def caught_up(self) -> None:
        """The draft answers everything that it was sent, without slots."""
        rows = self.to_draft()
        self.decoder._draft.received(self.draft, proposals([row.item for row in rows]))

    def answer(self, draft: TableDraft, target: TableTarget | None) -> None:
        """What the draft was sent is answered, and what the target was sent."""
        if rows := self.to_draft():
            self.decoder._draft.received(self.draft, draft.propose(propose_batch(rows, [])))
        if target is not None:
            self.decoder._target.received(self.target, target.verify(verify_batch(self.to_target(), [])))

    def watch_after(self, seconds: float) -> None:
        """Looks after the targets as if so much time had passed without a message."""
        self.decoder._target.watch(time.monotonic() + seconds)

    def receive(
        self,
        *answers: tuple[Stream, int, Status],
        link: Link[Any, Any] | None = None,
        errors: dict[int, str] | None = None,
    ) -> None:
        """The target's message: of each stream the next plain token, or an error."""
        at: dict[int, Outstanding] = {}
        echoes = []
        for stream, _, _ in answers:
            state = stream.state
            last = at.get(state.stream_id) or state.target.outstanding
            assert last is not None
            echoes.append(last)
            at[state.stream_id] = Outstanding(last.generation, last.committed + 1)
        self.decoder._target.received(
            link or self.target,
            verdicts(
                [stream.state.stream_id for stream, _, _ in answers],
                echoes,
                [token for _, token, _ in answers],
                [status for _, _, status in answers],
                errors or {},
            ),
        )


def verdicts(
    ids: Sequence[int],
    echoes: Sequence[Outstanding],
    bonus: Sequence[int],
    statuses: Sequence[Status],
    errors: dict[int, str],
) -> VerdictBatch:
    n = len(ids)
    return VerdictBatch(
        replies=Replies(
            stream_ids=np.array(ids, np.uint64),
            generations=np.array([echo.generation for echo in echoes], np.uint32),
            committed_lengths=np.array([echo.committed for echo in echoes], np.uint32),
            statuses=np.array(statuses, np.uint8),
            cached_lengths=np.array([echo.committed for echo in echoes], np.uint32),
            errors=errors,
        ),
        slots_done=np.zeros(n, np.uint8),
        cuts=np.zeros(n, np.uint8),
        p=np.empty(0, np.float32),
        emit=np.empty(0, np.uint32),
        bonus=np.array(bonus, np.uint32),
        dense_p=np.empty(0, np.float32),
    )


def proposals(items: Sequence[Any]) -> ProposalBatch:
    """Answers without slots."""
    none = np.empty(0, np.uint32)
    return ProposalBatch(
        replies=Replies(
            stream_ids=np.array([item.stream_id for item in items], np.uint64),
            generations=np.array([item.generation for item in items], np.uint32),
            committed_lengths=np.array([item.committed for item in items], np.uint32),
            statuses=np.zeros(len(items), np.uint8),
            cached_lengths=np.array([item.committed for item in items], np.uint32),
        ),
        slots=Slots(
            per_item=np.zeros(len(items), np.uint8),
            draft_ids=none,
            own_counts=none.astype(np.uint16),
            support_sizes=none.astype(np.uint16),
            q_ids=none,
            q_counts=none.astype(np.uint16),
            dense_q=none.astype(np.float32),
        ),
    )


class Plan:
    """A controller that gives out what it was told to, one gamma per stream asked for."""

    def __init__(self, gammas: Sequence[int]) -> None:
        self.gammas = list(gammas)
        self.asked: list[int] = []
        self.least_survival = 0.0

    def choose(self, stream_ids: Sequence[int], limits: Sequence[int]) -> list[int]:
        self.asked += stream_ids
        return [self.gammas.pop(0) for _ in stream_ids]

    def wants(self, stream_id: int) -> bool:
        return True

    def finished(self, stream_id: int, asked: int, proposed: int, accepted: int) -> None: ...

    def forget(self, stream_id: int) -> None: ...


class TestTokensOfOneMessage:
    """A loaded event loop reads several tokens of a plain run at once."""

    async def test_a_run_that_ends_is_followed_by_one_round(self) -> None:
        """Two rounds at one place: the target decodes on while the draft is asked, and one of them goes unanswered."""
        made = Sent()
        plan = Plan([0, 1, 0])
        made.decoder._plan.controller = plan
        stream = made.open()
        made.to_target()
        made.caught_up()
        made.receive((stream, 5, Status.OK))
        assert stream.state.phase is Phase.RUNNING and plan.asked == [stream.state.stream_id]
        made.to_target()
        stream.draining = True
        left = stream.state.run_end - stream.state.committed
        made.receive(*[(stream, 5, Status.OK)] * left)
        assert plan.asked == [stream.state.stream_id] * 2
        assert stream.state.phase is Phase.DRAFTING
        assert (len(made.to_draft()), made.to_target()) == (1, [])

    async def test_tokens_before_an_error_reach_their_readers(self) -> None:
        """What is committed and not handed on is lost for good: of the failing stream and of all others beside it."""
        made = Sent(num_speculative_tokens=0)
        failing, other = made.open(), made.open()
        made.to_target()
        made.receive((failing, 5, Status.OK), (failing, 0, Status.INTERNAL), (other, 6, Status.OK))
        assert [(await anext(stream)).tokens for stream in (failing, other)] == [(5,), (6,)]
        with pytest.raises(OutriderError, match="INTERNAL"):
            await anext(failing)
        assert other.state.phase is Phase.RUNNING


class TestRefusals:
    @pytest.mark.parametrize(
        ("message", "field"), [("allowed_token_ids: no token is left", "allowed_token_ids"), ("bases: odd", "request")]
    )
    async def test_a_bad_request_is_refused_by_the_field_that_the_client_knows(self, message: str, field: str) -> None:
        """Only the target can tell that masks leave nothing to draw; columns mean nothing to a client."""
        made = Sent(num_speculative_tokens=0)
        stream = made.open()
        made.receive((stream, 0, Status.INVALID_ARGUMENT), errors={0: message})
        with pytest.raises(InvalidArgument) as caught:
            await anext(stream)
        assert caught.value.field == field

    @pytest.mark.parametrize("status", [Status.NOT_FOUND, Status.ABORTED, Status.FAILED_PRECONDITION])
    async def test_a_stream_that_the_target_keeps_losing_ends_as_unavailable(self, status: Status) -> None:
        """A client reads 404 as an unknown model, and neither it nor 500 as something to try again."""
        made = Sent(num_speculative_tokens=0)
        stream = made.open()
        for _ in range(MAX_REFUSALS):
            made.receive((stream, 0, status))
        with pytest.raises(Unavailable):
            await anext(stream)

    async def test_an_item_may_wait_for_room_any_number_of_times(self) -> None:
        """2^1024 is no float: the error ended the link, and with it the rounds of all other streams."""
        made = Sent(num_speculative_tokens=0)
        stream = made.open()
        stream.refusals = 5_000
        made.receive((stream, 0, Status.RESOURCE_EXHAUSTED))
        assert stream.state.phase is Phase.RUNNING


class TestSilence:
    """A target that owes an answer for too long is taken for dead; one that reads a prompt is not."""

    @pytest.fixture
    def restarts(self, monkeypatch: pytest.MonkeyPatch) -> list[Link[Any, Any]]:
        """Links that were connected anew, in order."""
        restarted: list[Link[Any, Any]] = []
        monkeypatch.setattr(Link, "restart", lambda link, reason: restarted.append(link))
        return restarted

    @pytest.fixture
    async def made(self, restarts: list[Link[Any, Any]]) -> Sent:
        made = Sent(num_speculative_tokens=0)
        made.decoder._target._costs.target.observe(1, 0.02)
        return made

    async def test_an_overdue_step_is_noticed(self, made: Sent, restarts: list[Link[Any, Any]]) -> None:
        made.open()
        made.watch_after(0.9)
        assert restarts == []
        made.watch_after(2.0)
        assert restarts == [made.target]

    @pytest.mark.parametrize(("prompts", "tokens"), [(1, 1_500), (40, 40)])
    async def test_prompts_take_as_long_as_they_take(
        self, made: Sent, restarts: list[Link[Any, Any]], prompts: int, tokens: int
    ) -> None:
        """1,500 tokens take a CPU ten seconds; a reconnect in the middle costs everybody else their step."""
        running = made.open()
        made.receive((running, 5, Status.OK))
        reading = [made.open(prompt=tokens) for _ in range(prompts)]
        made.watch_after(30.0)
        assert restarts == []
        made.receive(*((stream, 5, Status.OK) for stream in reading))
        made.watch_after(30.0)
        assert restarts == [made.target]

    async def test_places_are_those_of_all_replicas_that_are_up(self, made: Sent) -> None:
        """One replica's number would leave the other idle; one that is gone has no places."""
        made.bring_up(made.other)
        for link, places in ((made.target, 4), (made.other, 6)):
            link.info = part_info(max_num_seqs=places)
        assert made.decoder.state.max_num_seqs == 10
        made.target.is_up = False
        assert made.decoder.state.max_num_seqs == 6

    async def test_a_replica_that_answers_does_not_hide_one_that_hangs(
        self, made: Sent, restarts: list[Link[Any, Any]]
    ) -> None:
        """Its streams would wait for their deadline, though the other one could take them over."""
        made.bring_up(made.other)
        stuck, running = made.open(), made.open()
        assert (stuck.link, running.link) == (made.target, made.other)
        stuck.posted_s, made.target.changed_s = stuck.posted_s - 5.0, 0.0
        made.receive((running, 5, Status.OK), link=made.other)
        made.watch_after(0.0)
        assert restarts == [made.target]


class TestPatience:
    """How long a proposal may take before its stream is decoded plainly."""

    async def drafting(self, monkeypatch: pytest.MonkeyPatch, *, draft_s: float, step_s: float) -> tuple[int, float]:
        """The deadline that the draft is sent, in ms, and the coordinator's own in seconds."""
        made = Sent(num_speculative_tokens=4)
        costs = made.decoder._target._costs
        for _ in range(200):  # so that no spread is left
            costs.draft.observe(4, draft_s)
            costs.target.observe(1, step_s)
        stream = made.open()
        made.to_target()
        made.caught_up()
        timers: list[float] = []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay, *_: timers.append(delay))
        made.receive((stream, 5, Status.OK))
        (row,), (timer,) = made.to_draft(), timers
        assert row.slots == 4
        return row.deadline_ms, timer

    async def test_a_proposal_is_waited_for_while_it_is_cheap_beside_a_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a busy CPU a thread is late by ten milliseconds; giving up for that costs half a second of drafting."""
        deadline_ms, limit_s = await self.drafting(monkeypatch, draft_s=0.001, step_s=0.1)
        assert (deadline_ms, limit_s) == (50, pytest.approx(0.1))

    async def test_a_slow_draft_has_a_multiple_of_its_own_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        deadline_ms, limit_s = await self.drafting(monkeypatch, draft_s=0.02, step_s=0.01)
        assert (deadline_ms, limit_s) == (pytest.approx(60, abs=2), pytest.approx(0.12, abs=0.004))

    async def test_a_loop_that_was_held_up_reads_before_it_gives_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The proposal lies unread in the socket; the draft would be left out for what the coordinator did."""
        made = Sent(num_speculative_tokens=4)
        stream = made.open()
        made.to_target()
        made.caught_up()
        loop, timers, now_s = asyncio.get_running_loop(), [], time.monotonic()
        monkeypatch.setattr(loop, "call_later", lambda _, call, *args: timers.append(partial(call, *args)))
        made.receive((stream, 5, Status.OK))
        monkeypatch.setattr(loop, "time", lambda: now_s + 10.0)
        monkeypatch.setattr("coordinator.draft_side.time.monotonic", lambda: now_s + 10.0)
        timers.pop()()
        assert stream.state.phase is Phase.DRAFTING
        timers.pop()()
        assert stream.state.phase is Phase.RUNNING
        assert made.decoder.counters.draft_failures["overdue"] == 1


class TestDenseForm:
    """Whole rows travel unlabelled: whose they are follows from which streams of a message want them."""

    async def test_answers_to_closed_streams_still_count_however_late_they_come(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A step that reads prompts outlasts any timer; taken for sparse, a closed stream's rows pass for another's."""
        numbers = iter([2, 1, 4, 3] * 2)  # seeds and stream ids
        monkeypatch.setattr("coordinator.decoder.secrets.randbits", lambda _: next(numbers))
        assert await self.second_stream(monkeypatch) == await self.second_stream(monkeypatch, close_first=True)

    async def second_stream(self, monkeypatch: pytest.MonkeyPatch, *, close_first: bool = False) -> tuple[int, ...]:
        """Tokens of the second of two streams whose rounds are answered by one message."""
        made = Sent(num_speculative_tokens=2)
        due: list[Callable[[], object]] = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda delay, call, *args: due.append(partial(call, *args)))
        draft, target = TableDraft(TABLE), TableTarget(TABLE)
        params = SamplingParams(max_tokens=100)
        first, second = (
            made.decoder.open(DecodingRequest(prompt_ids=(1,), params=params, form=Form.DENSE)) for _ in range(2)
        )
        made.answer(draft, target)  # the first round is plain
        made.answer(draft, None)
        batch = target.verify(verify_batch(made.to_target(), []))
        assert batch.slots_done.tolist() == [2, 2]
        if close_first:
            del due[:]
            await first.aclose()
            for timer in due:
                timer()
        await anext(second)
        made.decoder._target.received(made.target, batch)
        return (await anext(second)).tokens
