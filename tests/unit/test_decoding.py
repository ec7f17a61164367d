"""The decoding loop without services: transitions, compare-and-set, the cut, and both wire forms against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from coordinator import decoding
from coordinator.config import DecoderConfig
from coordinator.request import DecodingRequest
from coordinator.rows import propose_batch, verify_batch
from coordinator.state import Phase, Proposal, StreamState, new_stream
from outrider.errors import InvalidArgument, Status
from outrider.logprobs import LogprobBlock, LogprobRows, Logprobs
from outrider.sampling import Form, Rule, SamplingParams
from outrider.seam import Cut, ProposalBatch, VerdictBatch, prefix_hash
from tests.unit.pure_services import TableDraft, TableTarget

P = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.3, 0.4, 0.3]])
Q = np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4], [0.6, 0.2, 0.2]])
CONTEXT = 10_000
MS = {"stream_deadline_ms": 1_000}


def stream(
    prompt: tuple[int, ...] = (0, 1),
    stream_id: int = 1,
    *,
    rule: Rule = Rule.STANDARD,
    form: Form = Form.SPARSE,
    cut_text: Callable[[Sequence[int]], int | None] | None = None,
    seed: int = 7,
    sample_index: int = 0,
    **params: object,
) -> StreamState:
    params.setdefault("max_tokens", 1_000)
    request = DecodingRequest(
        prompt_ids=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        rule=rule,
        form=form,
        cut_text=cut_text,
        sample_index=sample_index,
    )
    return new_stream(stream_id, request, seed)


def round_trip(states: list[StreamState], gamma: int, draft: TableDraft, target: TableTarget) -> list[list[int]]:
    """One speculative round for all streams in one message each way; returns the emitted tokens."""
    by_id = {state.stream_id: state for state in states}
    asked = [decoding.propose(state, gamma, draft_deadline_ms=0, **MS) for state in states]
    answers = decoding.receive_proposals(by_id, draft.propose(propose_batch(asked, [])))
    sent = [decoding.verify(answer.state, answer.proposal, **MS) for answer in answers]
    verdicts = decoding.receive_verdicts(by_id, target.verify(verify_batch(sent, [])), CONTEXT)
    return [list(verdict.emission.tokens) for verdict in verdicts if verdict.emission is not None]


def proposal_of(tokens: list[int], cached: int = 0) -> Proposal:
    """A one-hot proposal."""
    n = len(tokens)
    return Proposal(
        draft_ids=np.array(tokens, np.uint32),
        own_counts=np.full(n, 65_535, np.uint16),
        support_sizes=np.zeros(n, np.uint16),
        q_ids=np.empty(0, np.uint32),
        q_counts=np.empty(0, np.uint16),
        dense_q=np.empty(0, np.float32),
        draft_cached=cached,
    )


def script_verdict(state: StreamState, emit: list[int], bonus: int) -> VerdictBatch:
    """A greedy target's answer to the outstanding item."""
    outstanding = state.target.outstanding
    assert outstanding is not None
    batch = TableTarget(P).verify(verify_batch([], []))
    slots = len(emit)
    return replace(
        batch,
        replies=replace(
            batch.replies,
            stream_ids=np.array([state.stream_id], np.uint64),
            generations=np.array([outstanding.generation], np.uint32),
            committed_lengths=np.array([outstanding.committed], np.uint32),
            statuses=np.array([Status.OK], np.uint8),
            cached_lengths=np.array([outstanding.committed + slots], np.uint32),
        ),
        slots_done=np.array([slots], np.uint8),
        cuts=np.array([Cut.NONE], np.uint8),
        p=np.zeros(slots, np.float32),
        emit=np.array(emit, np.uint32),
        bonus=np.array([bonus], np.uint32),
    )


def greedy_round(state: StreamState, drafted: list[int], emit: list[int], bonus: int) -> decoding.VerdictAnswer:
    """A round of a greedy stream with scripted sides."""
    state.draft.opened = True  # the proposal came from there
    decoding.verify(state, proposal_of(drafted, cached=state.committed + len(drafted) - 1), **MS)
    return decoding.receive_verdicts({1: state}, script_verdict(state, emit, bonus), CONTEXT)[0]


class TestRows:
    def test_first_item_opens_the_stream_and_carries_the_whole_prompt(self) -> None:
        """A service that never saw the stream must be able to start from the first message alone."""
        row = decoding.propose(stream((5, 6, 7)), 4, draft_deadline_ms=0, **MS)
        assert row.open is not None and row.open.prompt_length == 3
        assert (row.item.base, list(row.item.tokens), row.item.committed) == (0, [5, 6, 7], 3)

    def test_no_side_gets_a_key_of_another_role(self) -> None:
        """Whoever can compute another part's noise can correlate with it; the law would be gone."""
        state = stream()
        draft = decoding.propose(state, 1, draft_deadline_ms=0, **MS).open
        target = decoding.run(state, 1, **MS).open
        assert draft is not None and target is not None
        assert (draft.draft_key, draft.emit_key, draft.gumbel_key) == (state.keys.draft, 0, 0)
        assert (target.draft_key, target.emit_key, target.gumbel_key) == (0, state.keys.emit, 0)

    def test_coupled_streams_share_the_gumbel_key_only(self) -> None:
        state = stream(rule=Rule.COUPLED)
        for opened in (
            decoding.propose(state, 1, draft_deadline_ms=0, **MS).open,
            decoding.run(state, 1, **MS).open,
        ):
            assert opened is not None
            assert (opened.draft_key, opened.emit_key, opened.gumbel_key) == (0, 0, state.keys.gumbel)

    def test_later_items_send_only_what_the_service_lacks_with_the_hash_of_the_rest(self) -> None:
        """Sending everything each round costs the wire O(length); a wrong hash makes the service refuse."""
        state = stream((5, 6, 7), temperature=0.0)
        greedy_round(state, [1, 2], [1, 9], 0)
        row = decoding.propose(state, 2, draft_deadline_ms=0, **MS)
        # x_1 was accepted and fed by the draft, so only the emitted token is new to it.
        assert (row.item.base, list(row.item.tokens)) == (4, [9])
        assert row.item.prefix_hash == prefix_hash([5, 6, 7, 1])

    def test_draft_is_sent_its_last_sampled_token_after_full_acceptance(self) -> None:
        """x_gamma was sampled and never fed; forgetting that kills acceptance in silence (exactness.md section 7)."""
        state = stream((5,), temperature=0.0)
        greedy_round(state, [1, 2, 3], [1, 2, 3], 4)
        row = decoding.propose(state, 3, draft_deadline_ms=0, **MS)
        assert list(row.item.tokens) == [3, 4]
        assert state.target.held == state.committed - 1

    def test_draft_without_kv_is_not_sent_the_whole_text_each_round(self) -> None:
        """Prompt lookup holds tokens and no KV; its cached length of 0 must not cost O(length) per round."""
        state, draft = stream((5, 6, 7), temperature=0.0), TableDraft(np.eye(9))
        batch = draft.propose(propose_batch([decoding.propose(state, 2, draft_deadline_ms=0, **MS)], []))
        batch = replace(batch, replies=replace(batch.replies, cached_lengths=np.zeros(1, np.uint32)))
        answer = decoding.receive_proposals({1: state}, batch)[0]
        decoding.verify(state, answer.proposal, **MS)
        decoding.receive_verdicts({1: state}, script_verdict(state, [7, 8], 1), CONTEXT)
        row = decoding.propose(state, 2, draft_deadline_ms=0, **MS)
        assert (row.item.base, list(row.item.tokens)) == (3, [7, 8])


class TestCompareAndSet:
    def test_only_the_outstanding_item_is_answered(self) -> None:
        """Late, duplicated and reordered replies must fall out, or text doubles (field fault 108)."""
        state = stream(temperature=0.0)
        decoding.verify(state, proposal_of([1]), **MS)
        good = script_verdict(state, [1], 2)
        for column, value in (("generations", 9), ("committed_lengths", 1), ("stream_ids", 9)):
            dtype = getattr(good.replies, column).dtype
            other = replace(good, replies=replace(good.replies, **{column: np.array([value], dtype)}))
            assert decoding.receive_verdicts({1: state}, other, CONTEXT) == []
        assert len(decoding.receive_verdicts({1: state}, good, CONTEXT)) == 1
        assert decoding.receive_verdicts({1: state}, good, CONTEXT) == []
        assert state.tokens == [0, 1, 1, 2]

    def test_a_reply_twice_in_one_message_counts_once(self) -> None:
        state = stream(temperature=0.0)
        decoding.verify(state, proposal_of([1]), **MS)
        one = script_verdict(state, [1], 2)
        twice = doubled(one)
        assert len(decoding.receive_verdicts({1: state}, twice, CONTEXT)) == 1

    def test_given_up_proposal_is_dropped_when_it_comes_late(self) -> None:
        state, draft = stream(), TableDraft(Q)
        late = draft.propose(propose_batch([decoding.propose(state, 2, draft_deadline_ms=0, **MS)], []))
        decoding.back_to_plain(state)
        assert decoding.receive_proposals({1: state}, late) == []

    def test_an_echo_of_a_catch_up_does_not_answer_the_question_after_it(self) -> None:
        """A duplicated empty answer would pass for an empty proposal."""
        state, draft = stream(), TableDraft(Q)
        echo = draft.propose(propose_batch([decoding.catch_up(state, **MS)], []))
        assert len(decoding.receive_proposals({1: state}, echo)) == 1
        decoding.propose(state, 2, draft_deadline_ms=0, **MS)
        assert decoding.receive_proposals({1: state}, echo) == []

    def test_more_verified_slots_than_sent_is_nonsense(self) -> None:
        state = stream(temperature=0.0)
        decoding.verify(state, proposal_of([1]), **MS)
        with pytest.raises(InvalidArgument, match="slots_done"):
            decoding.receive_verdicts({1: state}, script_verdict(state, [1, 2], 3), CONTEXT)


class TestResend:
    def test_a_lost_verification_is_sent_again_with_the_same_x_and_q(self) -> None:
        """Drawing again after a look at x_i biases the law (exactness.md section 5)."""
        state, draft = stream(), TableDraft(Q)
        batch = draft.propose(propose_batch([decoding.propose(state, 3, draft_deadline_ms=0, **MS)], []))
        answer = decoding.receive_proposals({1: state}, batch)[0]
        first = decoding.verify(state, answer.proposal, **MS)
        state.target.forget()
        again = decoding.resend(state, **MS)
        assert again.proposal is first.proposal
        assert again.item.generation > first.item.generation
        assert again.open is not None and list(again.item.tokens) == state.tokens

    def test_a_lost_run_goes_on_with_what_is_left_of_it(self) -> None:
        state = stream(temperature=0.0)
        decoding.run(state, 8, **MS)
        decoding.receive_verdicts({1: state}, script_verdict(state, [], 5), CONTEXT)
        state.target.give_up()
        row = decoding.resend(state, **MS)
        assert (row.run, row.item.committed, row.item.base) == (7, 3, 2)


class TestRun:
    def test_tokens_of_a_run_are_taken_in_order_even_from_one_message(self) -> None:
        """A loaded event loop reads several tokens of a stream at once."""
        state = stream(temperature=0.0)
        decoding.run(state, 2, **MS)
        first = script_verdict(state, [], 5)
        batch = doubled(first)
        batch = replace(
            batch,
            replies=replace(batch.replies, committed_lengths=np.array([2, 3], np.uint32)),
            bonus=np.array([5, 6], np.uint32),
        )
        answers = decoding.receive_verdicts({1: state}, batch, CONTEXT)
        assert [answer.emission.tokens for answer in answers if answer.emission] == [(5,), (6,)]
        assert state.phase is Phase.OPENED

    def test_a_topped_up_run_continues_where_it_is(self) -> None:
        state = stream(temperature=0.0)
        decoding.run(state, 2, **MS)
        in_flight = script_verdict(state, [], 5)
        decoding.receive_verdicts({1: state}, in_flight, CONTEXT)
        row = decoding.run(state, 8, **MS)
        assert (row.item.committed, row.run, row.item.generation) == (3, 8, 0)
        assert len(decoding.receive_verdicts({1: state}, script_verdict(state, [], 6), CONTEXT)) == 1
        assert state.phase is Phase.RUNNING


class TestCut:
    """The accepted sequence ends at the earliest token that hits; at one token: stop id, string, limit, context."""

    @pytest.mark.parametrize(
        ("params", "at_string", "context", "kept", "reason", "stop_token"),
        [
            ({}, None, CONTEXT, [1, 2, 3, 4], None, None),
            ({"stop_token_ids": (3,)}, None, CONTEXT, [1, 2, 3], "stop", 3),
            ({"max_tokens": 2}, None, CONTEXT, [1, 2], "length", None),
            ({}, None, 5, [1, 2, 3], "length", None),
            ({}, 1, CONTEXT, [1, 2], "stop", None),
            ({"stop_token_ids": (2,)}, 1, CONTEXT, [1, 2], "stop", 2),
            ({"stop_token_ids": (3,)}, 1, CONTEXT, [1, 2], "stop", None),
            ({"stop_token_ids": (2,), "max_tokens": 2}, None, CONTEXT, [1, 2], "stop", 2),
            ({"max_tokens": 2}, 1, CONTEXT, [1, 2], "stop", None),
            ({"max_tokens": 2}, None, 4, [1, 2], "length", None),
            ({"stop_token_ids": (4,)}, None, CONTEXT, [1, 2, 3, 4], "stop", 4),
        ],
    )
    def test_earliest_hit_decides(
        self,
        params: dict[str, object],
        at_string: int | None,
        context: int,
        kept: list[int],
        reason: str | None,
        stop_token: int | None,
    ) -> None:
        def find(tokens: Sequence[int]) -> int | None:
            return at_string if at_string is not None and at_string < len(tokens) else None

        state = stream(cut_text=find, temperature=0.0, **params)
        decoding.verify(state, proposal_of([1, 2, 3]), **MS)
        answer = decoding.receive_verdicts({1: state}, script_verdict(state, [1, 2, 3], 4), context)[0]
        assert answer.emission is not None
        assert list(answer.emission.tokens) == kept
        assert (answer.emission.finish_reason, answer.emission.stop_token) == (reason, stop_token)
        assert state.tokens == [0, 1, *kept]

    def test_text_is_looked_at_once_and_only_where_no_id_has_cut_before(self) -> None:
        """The detokenizer has a state: tokens shown to it twice, or in vain, corrupt the text."""
        seen: list[list[int]] = []
        state = stream(cut_text=lambda tokens: seen.append(list(tokens)), temperature=0.0, stop_token_ids=(3,))  # type: ignore[func-returns-value]
        greedy_round(state, [1, 2], [1, 2], 5)
        greedy_round(state, [6, 3, 7], [6, 3, 7], 8)
        assert seen == [[1, 2, 5], [6, 3]]

    def test_failing_search_for_stop_strings_ends_its_own_stream_only(self) -> None:
        """The caller's code runs inside the loop of all streams."""

        def broken(tokens: Sequence[int]) -> int | None:
            raise ValueError("no such text")

        states = [stream(stream_id=1, cut_text=broken), stream(stream_id=2)]
        assert len(round_trip(states, 2, TableDraft(Q), TableTarget(P))) == 1
        assert states[0].committed == 2 and states[1].committed > 2

    def test_tokens_behind_the_end_count_nowhere(self) -> None:
        """Tokens after an end-of-sequence id counted as accepted inflate every rate."""
        state = stream(temperature=0.0, stop_token_ids=(2,))
        answer = greedy_round(state, [1, 2, 3, 4], [1, 2, 3, 4], 5)
        assert answer.round == (2, 2, 2)
        stats = state.stats
        assert (stats.num_draft_tokens, stats.num_tested_tokens, stats.num_accepted_draft_tokens) == (2, 2, 2)
        assert stats.acceptance_histogram == [0, 0, 1]

    def test_slots_behind_a_rejection_are_drafted_but_not_tested(self) -> None:
        """Counting them as tested makes alpha look small where gamma is large."""
        state = stream(temperature=0.0)
        answer = greedy_round(state, [1, 2, 3, 4], [1, 9, 3, 4], 5)
        assert answer.round == (4, 2, 1)
        assert answer.emission is not None
        assert (answer.emission.tokens, answer.emission.drafted) == ((1, 9), (True, False))


class TestAcceptance:
    def test_sparse_and_dense_forms_emit_the_same_tokens_for_the_same_noise(self) -> None:
        """The sparse form is an optimisation of the textbook; any difference is a bug in one of them."""
        texts = []
        for form in (Form.SPARSE, Form.DENSE):
            draft, target = TableDraft(Q), TableTarget(P)
            states = [stream(stream_id=i, form=form, seed=i, sample_index=i) for i in range(1, 9)]
            for gamma in (1, 4, 2, 3, 5, 1, 4):
                round_trip(states, gamma, draft, target)
            texts.append([state.tokens for state in states])
        assert texts[0] == texts[1]

    def test_one_message_mixes_rules_and_forms_without_a_slot_going_astray(self) -> None:
        """Each stream must get what it gets alone; offsets into shared columns are where rows go wrong."""

        def batch() -> list[StreamState]:
            return [
                stream(stream_id=1, seed=1),
                stream(stream_id=2, seed=2, rule=Rule.COUPLED),
                stream(stream_id=3, seed=3, form=Form.DENSE),
                stream(stream_id=4, seed=4, temperature=0.0),
                stream(stream_id=5, seed=5, form=Form.DENSE),
                stream(stream_id=6, seed=6),
            ]

        together, draft, target = batch(), TableDraft(Q), TableTarget(P)
        alone = [(state, TableDraft(Q), TableTarget(P)) for state in batch()]
        for gamma in (3, 1, 4, 2):
            round_trip(together, gamma, draft, target)
            for state, own_draft, own_target in alone:
                round_trip([state], gamma, own_draft, own_target)
        assert [state.tokens for state in together] == [state.tokens for state, _, _ in alone]

    def test_coupled_text_is_that_of_plain_decoding_for_any_gamma(self) -> None:
        """The coupled rule's promise, on the loop itself."""
        texts = []
        for gamma in (0, 1, 4):
            state, draft, target = stream(rule=Rule.COUPLED, seed=11), TableDraft(Q), TableTarget(P)
            while state.committed < 120:
                if gamma:
                    round_trip([state], gamma, draft, target)
                else:
                    batch = verify_batch([decoding.run(state, 1, **MS)], [])
                    decoding.receive_verdicts({1: state}, target.verify(batch), CONTEXT)
            texts.append(state.tokens[:120])
        assert texts[0] == texts[1] == texts[2]

    def test_emitted_law_is_the_targets(self) -> None:
        """Transitions of the emitted text against P: with 3,000 of them a total variation of .06 in a row is seen."""
        assert transition_error(Q, gamma=3, rounds=50) < 0.06

    def test_planted_error_is_seen(self) -> None:
        """The test above must fail when accepting is wrong: here the draft's own q is not the one declared."""

        class Lying(TableDraft):
            def propose(self, batch: object) -> ProposalBatch:
                honest = super().propose(batch)  # type: ignore[arg-type]
                # Declares each drawn token half as probable as it was: accepted too often.
                halved = (honest.slots.own_counts + 1) // 2 - 1
                return replace(honest, slots=replace(honest.slots, own_counts=halved.astype(np.uint16)))

        assert transition_error(Q, gamma=3, rounds=50, draft=Lying(Q)) > 0.06


def transition_error(q: np.ndarray, *, gamma: int, rounds: int, draft: TableDraft | None = None) -> float:  # type: ignore[type-arg]
    """Largest total variation between an empirical transition row and the target's."""
    draft, target = draft or TableDraft(q), TableTarget(P)
    states = [stream(stream_id=i, seed=i, max_tokens=100_000) for i in range(1, 31)]
    for _ in range(rounds):
        round_trip(states, gamma, draft, target)
    counts = np.zeros((3, 3))
    for state in states:
        np.add.at(counts, (state.tokens[1:-1], state.tokens[2:]), 1)
    law = counts / counts.sum(axis=1, keepdims=True)
    return float(np.abs(law - P).sum(axis=1).max() / 2)


def doubled(batch: VerdictBatch) -> VerdictBatch:
    """The items of a one-item batch twice."""
    columns = {
        name: np.tile(getattr(batch.replies, name), 2)
        for name in ("stream_ids", "generations", "committed_lengths", "statuses", "cached_lengths")
    }
    return replace(
        batch,
        replies=replace(batch.replies, **columns),
        slots_done=np.tile(batch.slots_done, 2),
        cuts=np.tile(batch.cuts, 2),
        p=np.tile(batch.p, 2),
        emit=np.tile(batch.emit, 2),
        bonus=np.tile(batch.bonus, 2),
    )


class TestConfig:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("target", ()),
            ("target", "127.0.0.1:1"),
            ("num_speculative_tokens", -1),
            ("num_speculative_tokens", 65),
            ("num_speculative_tokens", "many"),
            ("max_num_speculative_tokens", 0),
            ("request_timeout_s", 0),
            ("request_timeout_s", -1),
            ("run_credit", 0),
            ("acceptance_baseline", 1.0),
        ],
    )
    def test_impossible_values_are_refused_by_name(self, field: str, value: object) -> None:
        """A timeout of 0 that means "never", or a gamma that is quietly clipped, surprises in production."""
        values: dict[str, object] = {"target": ("127.0.0.1:1",), field: value}
        with pytest.raises(InvalidArgument, match=field):
            DecoderConfig(**values)  # type: ignore[arg-type]


class TestLogprobs:
    """Log-probabilities belong to the round and to the tokens that were kept of it."""

    def answered(self, own: list[float], rows: int, *, max_tokens: int = 100) -> decoding.VerdictAnswer:
        """A greedy round of three slots, of which two are accepted."""
        state = stream(temperature=0.0, max_tokens=max_tokens)
        state.request = replace(state.request, logprobs=1)
        state.draft.opened = True
        decoding.verify(state, proposal_of([1, 2, 0], cached=4), **MS)
        block = LogprobRows(
            np.array(own, np.float32), np.arange(rows, dtype=np.uint32)[:, None], np.zeros((rows, 1), np.float32)
        )
        batch = replace(
            script_verdict(state, [1, 2, 1], 0), logprobs=Logprobs.of([LogprobBlock(1, state.committed, block)])
        )
        return decoding.receive_verdicts({1: state}, batch, CONTEXT)[0]

    def test_each_kept_token_has_its_own_value(self) -> None:
        """Guards against values of slots behind a rejection, or of drafted tokens where another one was emitted."""
        emission = self.answered([-1, -2, -3, -11, -12, -13, -20], 4).emission
        assert emission is not None and emission.logprobs is not None
        assert emission.tokens == (1, 2, 1)
        assert emission.logprobs.own.tolist() == [-1, -2, -13]
        assert emission.logprobs.top_ids.tolist() == [[0], [1], [2]]

    def test_the_cut_cuts_them_too(self) -> None:
        """Guards against values for tokens behind the end of the answer."""
        emission = self.answered([-1, -2, -3, -11, -12, -13, -20], 4, max_tokens=2).emission
        assert emission is not None and emission.logprobs is not None
        assert (len(emission.tokens), emission.logprobs.own.tolist()) == (2, [-1, -2])

    @pytest.mark.parametrize(("own", "rows"), [([-1.0] * 6, 4), ([-1.0] * 7, 3)])
    def test_those_of_another_round_are_refused(self, own: list[float], rows: int) -> None:
        """Guards against values that are shifted because a service counts slots in another way."""
        answer = self.answered(own, rows)
        assert (answer.status, answer.emission) == (Status.INTERNAL, None)
        assert "logprobs" in answer.message

    def test_missing_ones_are_refused(self) -> None:
        """Guards against an answer that goes on without what was asked for."""
        state = stream(temperature=0.0)
        state.request = replace(state.request, prompt_logprobs=1)
        decoding.run(state, 1, **MS)
        (answer,) = decoding.receive_verdicts({1: state}, script_verdict(state, [], 1), CONTEXT)
        assert (answer.status, answer.emission, state.generated) == (Status.INTERNAL, None, 0)

    def test_whole_rows_do_not_travel_where_values_are_wanted(self) -> None:
        """Guards against a token that the coordinator draws and the target has no value for; both forms draw alike."""
        state = stream(form=Form.DENSE)
        state.request = replace(state.request, logprobs=1)
        opened = decoding.run(state, 1, **MS).open
        assert opened is not None and (opened.form, opened.logprobs) == (Form.SPARSE, 1)
        draft = decoding.propose(state, 1, draft_deadline_ms=0, **MS).open
        assert draft is not None and (draft.form, draft.logprobs) == (Form.SPARSE, None)
