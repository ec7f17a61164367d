"""The proposer: what it feeds, what it draws, when it answers. On tiny random models and stubs, step by step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.faults import Faults
from draft_service.job import Job
from draft_service.sampler import Sampler
from outrider.distribution import TOTAL, check_slots
from outrider.engine.config import EngineConfig
from outrider.engine.model import LoadedModel, load_model
from outrider.engine.sequence import Sequence
from outrider.engine.stub import FAULTS, parse
from outrider.engine.stub_model import load_stub
from outrider.errors import Status
from outrider.sampling import Form, Rule, SamplingParams
from outrider.seam import Cut, ProposalBatch, StreamOpen
from tests.service.harness import Item, drafted, open_stream, propose
from tests.unit import drafting
from tests.unit.drafting import LEASE_S, OWNER, Bench, noted_timing
from tests.unit.tiny import tiny_llama

VOCAB = 64
PROMPT = [5, 17, 3, 42, 8, 9, 17, 3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=1_000)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=1_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    folder: Path = tiny_llama(tmp_path_factory.mktemp("tiny"), vocab=VOCAB)
    loaded = load_model(
        EngineConfig(model=str(folder), dtype="float32", kv_cache_tokens=4096, max_num_batched_tokens=64, threads=1)
    )
    loaded.allocate_kv(loaded.num_blocks)
    return loaded


def stub(name: str) -> Any:
    return load_stub(parse(name))


def sampled_stream(stream_id: int, **fields: Any) -> StreamOpen:
    keys = {"draft_key": 1_000 + stream_id, "gumbel_key": 77}
    return open_stream(stream_id, PROMPT, SAMPLED, **{**keys, **fields})


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("form", [Form.SPARSE, Form.DENSE])
@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.COUPLED])
def test_catching_up_equals_a_fresh_prefill(model: LoadedModel, params: SamplingParams, form: Form, rule: Rule) -> None:
    """Guards acceptance: an off-by-one in the draft's KV never changes a text, it only makes proposals worse.

    A stream goes through rounds in which 0 to gamma slots are accepted; after each, another stream that is opened with
    the same tokens (and the same noise key) must propose the same slots with the same q.
    """
    bench = Bench(model)
    rng = np.random.default_rng(0)
    stream = open_stream(1, PROMPT, params, form=form, rule=rule, draft_key=5, gumbel_key=6)
    tokens, slots, opens, base = list(PROMPT), 4, (stream,), 0
    for round_number in range(12):
        bench.send(propose([Item(1, tokens, base)], slots, opens=opens))
        warm = bench.run()
        fresh_id = 100 + round_number
        bench.send(propose([Item(fresh_id, tokens)], slots, opens=(replace(stream, stream_id=fresh_id),)))
        fresh = bench.run()
        assert drafted(warm)[1] == drafted(fresh)[fresh_id]
        for column in ("own_counts", "support_sizes", "q_ids", "q_counts", "dense_q"):
            np.testing.assert_array_equal(getattr(warm.slots, column), getattr(fresh.slots, column))
        accepted = int(rng.integers(0, slots + 1))
        emitted = [*drafted(warm)[1][:accepted], int(rng.integers(0, VOCAB))]
        tokens, opens, base = tokens + emitted, (), len(tokens)


def test_nobody_waits_for_the_device_before_something_was_drawn(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the overlap of host and device: asking how long the pass takes waits for its end."""
    order: list[str] = []
    bench = Bench(model)
    draw = bench.proposer._sampler.draw

    def drawing(*arguments: Any) -> Any:
        order.append("draw")
        return draw(*arguments)

    monkeypatch.setattr(bench.proposer._sampler, "draw", drawing)
    monkeypatch.setattr(drafting, "StepTiming", partial(noted_timing, order))
    bench.propose(propose([Item(1, PROMPT)], 3, opens=(open_stream(1, PROMPT, GREEDY),)))
    assert order == ["draw", "measure"] * 3


def test_after_a_round_the_cache_ends_where_the_algorithm_says(model: LoadedModel) -> None:
    """Guards the bookkeeping of exactness: committed - 2 after full acceptance, committed - 1 otherwise, and what was
    drafted and confirmed is not fed again."""
    bench = Bench(model)
    gamma = 4
    tokens = list(PROMPT)
    x = bench.propose(propose([Item(1, tokens)], gamma, opens=(open_stream(1, tokens, GREEDY),)))[1]
    sequence = bench.streams.get(1)
    assert sequence is not None
    for accepted in (gamma, 2, gamma, 0):
        base = len(tokens)
        tokens = [*tokens, *x[:accepted], 1 if x[accepted : accepted + 1] != [1] else 2]
        bench.send(propose([Item(1, tokens, base)], gamma))
        expected = len(tokens) - (2 if accepted == gamma else 1)
        assert sequence.cached == expected
        steps = len(bench.steps)
        x = drafted(bench.run())[1]
        assert [len(step.spans[0].tokens) for step in bench.steps[steps:]] == [len(tokens) - expected, 1, 1, 1]


def test_the_deadline_cuts_at_a_slot_boundary() -> None:
    """Guards latency: a proposal leaves with what is done when its time is up, and never later than one step."""
    bench = Bench(stub("stub:perfect?tokens=9,8,7,6,5,4,3,2,1"))
    opens = (open_stream(1, PROMPT, GREEDY), open_stream(2, PROMPT, GREEDY))
    bench.send(propose([Item(1, PROMPT)], 6, opens=opens, deadline_ms=25))
    bench.send(propose([Item(2, PROMPT)], 6))
    for _ in range(3):
        assert bench.step(took_s=0.010)
    assert drafted(bench.link.take()) == {1: [9, 8, 7]}
    assert drafted(bench.run()) == {2: [9, 8, 7, 6, 5, 4]}


def test_a_deadline_that_passed_before_the_first_step_gives_no_slots() -> None:
    """Guards against work for a round that is over."""
    bench = Bench(stub("stub:perfect"))
    bench.send(propose([Item(1, PROMPT)], 4, opens=(open_stream(1, PROMPT, GREEDY),), deadline_ms=5))
    bench.now += 1.0
    assert drafted(bench.run()) == {1: []}
    assert not bench.steps


def test_streams_join_and_leave_between_steps() -> None:
    """Guards continuous batching: neither a new stream waits for the others' proposals, nor they for its."""
    bench = Bench(stub("stub:perfect?tokens=9,8,7,6"))
    bench.send(propose([Item(1, PROMPT)], 4, opens=(open_stream(1, PROMPT, GREEDY),)))
    bench.step()
    bench.send(propose([Item(2, PROMPT)], 2, opens=(open_stream(2, PROMPT, GREEDY),)))
    bench.step()
    bench.step()
    assert drafted(bench.link.take()) == {2: [9, 8]}
    bench.step()
    assert drafted(bench.link.take()) == {1: [9, 8, 7, 6]}
    assert [len(step.spans) for step in bench.steps] == [1, 2, 2, 1]


def test_thirty_two_streams_are_answered_in_one_batch() -> None:
    """Guards the wire: one message a round whatever the number of streams."""
    bench = Bench(stub("stub:perfect"), max_num_seqs=64, max_num_batched_tokens=512)
    rows = [Item(stream_id, PROMPT) for stream_id in range(32)]
    bench.send(propose(rows, 5, opens=tuple(open_stream(row.stream_id, PROMPT, GREEDY) for row in rows)))
    while bench.step():
        pass
    assert [len(batch.replies) for batch in bench.link.batches] == [32]
    assert len(bench.steps) == 5


def test_a_long_prompt_is_read_in_pieces_beside_others(model: LoadedModel) -> None:
    """Guards the token budget, and short streams against waiting for somebody's long prompt."""
    bench = Bench(model, max_num_batched_tokens=64)
    rng = np.random.default_rng(1)
    long = rng.integers(1, VOCAB, 300).tolist()
    bench.send(propose([Item(2, PROMPT)], 3, opens=(open_stream(2, PROMPT, GREEDY),)))
    bench.step()
    bench.send(propose([Item(1, long)], 2, opens=(open_stream(1, long, GREEDY),)))
    bench.step()
    bench.step()
    assert drafted(bench.link.take()).keys() == {2}
    together = drafted(bench.run())[1]
    assert all(sum(len(span.tokens) for span in step.spans) <= 64 for step in bench.steps)
    assert (
        together
        == Bench(model, max_num_batched_tokens=512).propose(
            propose([Item(1, long)], 2, opens=(open_stream(1, long, GREEDY),))
        )[1]
    )


def test_no_slots_wanted_only_brings_the_cache_up_to_date(model: LoadedModel) -> None:
    """Guards the catch-up in one prefill that precedes a real proposal after plain decoding."""
    bench = Bench(model)
    bench.send(propose([Item(1, PROMPT)], 0, opens=(open_stream(1, PROMPT, GREEDY),)))
    batch = bench.run()
    assert batch.replies.cached_lengths.tolist() == [len(PROMPT)]
    assert drafted(batch) == {1: []}
    # The row behind the last token is still to be had: that token is fed a second time.
    warm = bench.propose(propose([Item(1, PROMPT, len(PROMPT), generation=1)], 3))[1]
    assert warm == bench.propose(propose([Item(2, PROMPT)], 3, opens=(open_stream(2, PROMPT, GREEDY),)))[2]


def slots_law(batch: ProposalBatch) -> np.ndarray:
    cuts = check_slots(
        batch.slots.support_sizes,
        batch.slots.q_ids,
        batch.slots.q_counts,
        batch.slots.draft_ids,
        batch.slots.own_counts,
    )
    return cuts


def test_what_is_declared_is_well_formed(model: LoadedModel) -> None:
    """Guards the target's check: an honest draft must never be taken for a lying one."""
    bench = Bench(model, draft_top_k=16)
    rows = [Item(stream_id, PROMPT) for stream_id in range(16)]
    bench.send(propose(rows, 6, opens=tuple(sampled_stream(row.stream_id) for row in rows)))
    batch = bench.run()
    assert not slots_law(batch).any()
    assert batch.slots.support_sizes.max() <= 16


@pytest.mark.parametrize("form", [Form.SPARSE, Form.DENSE])
def test_tokens_follow_the_q_that_is_declared(form: Form) -> None:
    """Guards exactness at its root: x_i is drawn from the very q that is shipped.

    20,000 draws from one row of 12 ids, cut to the 5 most probable in the sparse form. Chi-square against the declared
    q: the expected value is the number of free cells f, and f + 6 sqrt(2 f) is passed by chance about once in 10^6.
    The planted error, drawing from the whole row while declaring the cut one, is far beyond it.
    """
    n, ids = 20_000, 12
    logits = torch.log(torch.arange(1.0, ids + 1)).repeat(n, 1)
    prompt = [0]

    def rows(first: int) -> list[tuple[Job, Sequence]]:
        made = []
        for key in range(first, first + n):
            opened = open_stream(key, prompt, SAMPLED, form=form, draft_key=key)
            job = Job(opened, 0, 1, 1, None, OWNER, 0.0)
            made.append((job, Sequence(opened, OWNER, 0.0, tokens=prompt, committed=1)))
        return made

    nothing_excluded = {OWNER: np.empty(0, np.uint32)}
    draw = Sampler(draft_top_k=5, greedy_draft=False).draw
    slots = draw(logits.clone(), rows(1), nothing_excluded)
    first = slots[0]
    assert first is not None
    if first.dense is not None:
        declared = first.dense.astype(np.float64)
        planted = np.where(np.arange(ids) >= ids - 5, declared, 0)
    else:
        assert first.support is not None
        declared = np.zeros(ids)
        declared[first.support.ids] = first.support.counts / TOTAL
        planted = np.arange(1, ids + 1) / np.arange(1, ids + 1).sum()
    tokens = np.array([slot.token for slot in slots if slot is not None])

    def statistic(law: np.ndarray) -> float:
        cells = law > 0
        if np.any(~cells[tokens]):
            return np.inf
        expected = law[cells] / law[cells].sum() * n
        seen = np.bincount(tokens, minlength=ids)[cells]
        free = cells.sum() - 1
        return float((((seen - expected) ** 2 / expected).sum() - free) / np.sqrt(2 * free))

    assert statistic(declared) < 6
    assert statistic(planted) > 60


def test_a_retry_proposes_the_same_again(model: LoadedModel) -> None:
    """Guards against re-rolling: an outcome that nobody saw may be drawn again, but only the same."""
    bench = Bench(model)
    first = bench.propose(propose([Item(1, PROMPT)], 5, opens=(sampled_stream(1),)))[1]
    again = bench.propose(propose([Item(1, PROMPT, generation=1)], 5))[1]
    other = bench.propose(propose([Item(2, PROMPT)], 5, opens=(sampled_stream(2),)))[2]
    assert first == again
    assert first != other


def test_excluded_ids_are_never_proposed(model: LoadedModel) -> None:
    """Guards pairs of models whose vocabularies differ: what the target reads otherwise must not be in q."""
    excluded = np.arange(0, VOCAB, 2, dtype=np.uint32)
    bench = Bench(model, excluded=np.append(excluded, np.uint32(10**6)))
    streams = [sampled_stream(1), sampled_stream(2, rule=Rule.COUPLED), open_stream(3, PROMPT, GREEDY)]
    bench.send(propose([Item(s.stream_id, PROMPT) for s in streams], 8, opens=tuple(streams)))
    batch = bench.run()
    assert all(token % 2 for tokens in drafted(batch).values() for token in tokens)
    assert (batch.slots.q_ids % 2).all()


def test_a_greedy_draft_declares_a_one_hot_q(model: LoadedModel) -> None:
    """Guards against the raw softmax as the q of an argmax, the classic bias."""
    bench = Bench(model, greedy_draft=True)
    bench.send(propose([Item(1, PROMPT)], 5, opens=(sampled_stream(1),)))
    batch = bench.run()
    assert not batch.slots.support_sizes.any()
    assert (batch.slots.own_counts == TOTAL - 1).all()
    greedy = bench.propose(propose([Item(2, PROMPT)], 5, opens=(open_stream(2, PROMPT, GREEDY),)))[2]
    assert drafted(batch)[1] == greedy


def test_a_drafted_stop_id_ends_the_proposal() -> None:
    """Guards against slots that can never be used."""
    params = replace(GREEDY, stop_token_ids=(7,))
    bench = Bench(stub("stub:perfect?tokens=9,8,7,6,5"))
    assert bench.propose(propose([Item(1, PROMPT)], 5, opens=(open_stream(1, PROMPT, params),))) == {1: [9, 8, 7]}


class NanModel:
    """A stub that loses its mind at one position."""

    def __init__(self, at: int) -> None:
        self._inner = stub("stub:perfect?tokens=9,8,7,6,5")
        self.info, self.num_blocks = self._inner.info, self._inner.num_blocks
        self._at = at

    def forward(self, spans: Any) -> torch.Tensor:
        logits = self._inner.forward(spans)
        for row, span in enumerate(spans):
            if span.start + len(span.tokens) == self._at:
                logits[row] = torch.nan
        return logits


def test_a_nan_row_ends_the_proposal_before_it() -> None:
    """Guards the wire against a q that is none: slots before it are good, the stream lives on."""
    bench = Bench(NanModel(at=len(PROMPT) + 2))
    opens = (open_stream(1, PROMPT, GREEDY), open_stream(2, [*PROMPT, 1, 1, 1, 1], GREEDY))
    got = bench.propose(propose([Item(1, PROMPT), Item(2, [*PROMPT, 1, 1, 1, 1])], 4, opens=opens))
    assert got[1] == [9, 8]
    assert got[2] == [9, 8, 7, 6]


def test_a_failed_step_is_answered_and_the_next_one_works() -> None:
    """Guards against items without an answer: the coordinator would wait for them."""
    bench = Bench(stub("stub:perfect?tokens=9,8,7,6"))
    bench.send(propose([Item(1, PROMPT)], 3, opens=(open_stream(1, PROMPT, GREEDY),)))
    plan = bench.proposer.plan()
    bench.proposer.fail(plan, RuntimeError("device"))  # type: ignore[arg-type]
    assert bench.link.take().replies.status(0) == Status.INTERNAL
    assert bench.propose(propose([Item(1, PROMPT, generation=1)], 3)) == {1: [9, 8, 7]}


def test_a_stream_beyond_the_context_gets_no_slots_and_no_error() -> None:
    """Guards long texts: a draft with a shorter context than the target's must not end the request."""
    bench = Bench(stub("stub:perfect"), max_model_len=10)
    bench.send(propose([Item(1, PROMPT)], 5, opens=(open_stream(1, PROMPT, GREEDY),)))
    assert len(drafted(bench.run())[1]) == 3
    bench.send(propose([Item(1, [*PROMPT, 1, 2, 3], len(PROMPT))], 5))
    batch = bench.run()
    assert drafted(batch) == {1: []}
    assert batch.replies.status(0) == Status.OK
    assert bench.blocks.used_blocks == 0


def test_a_token_that_the_draft_lacks_gives_no_slots_and_no_error(model: LoadedModel) -> None:
    """Guards the embedding against an index beyond its rows where the target's vocabulary is the larger one."""
    bench = Bench(model)
    prompt = [1, VOCAB + 5, 2]
    bench.send(propose([Item(1, prompt)], 3, opens=(open_stream(1, prompt, GREEDY),)))
    batch = bench.run()
    assert drafted(batch) == {1: []}
    assert batch.replies.status(0) == Status.OK


def test_a_full_pool_costs_slots_and_idle_streams_their_cache() -> None:
    """Guards drafting after many long prompts: a draft pool that fills up for ever stops drafting without a word."""
    bench = Bench(stub("stub:perfect"), num_blocks=4)  # 64 tokens
    for stream_id in range(1, 21):
        long = [stream_id, *range(1, 40)]
        opens = (open_stream(stream_id, long, GREEDY),)
        batch_now = propose([Item(stream_id, long)], 3, opens=opens)
        if stream_id == 2:
            # The first stream was active just now: this one goes without rather than robbing it.
            bench.send(batch_now)
            refused = bench.run()
            assert drafted(refused) == {2: []} and refused.replies.status(0) is Status.RESOURCE_EXHAUSTED
            continue
        bench.now += 5.0
        assert len(bench.propose(batch_now)[stream_id]) == 3
    assert bench.blocks.used_blocks <= 4


def test_a_lost_link_frees_its_blocks_after_the_lease_and_not_before() -> None:
    """Guards the pool against coordinators that never come back, and returning ones against losing their cache."""
    bench = Bench(stub("stub:perfect"))
    bench.propose(propose([Item(1, PROMPT)], 3, opens=(open_stream(1, PROMPT, GREEDY),)))
    bench.detach()
    bench.now += LEASE_S - 1
    assert not bench.step()
    assert bench.blocks.used_blocks > 0
    bench.attach(epoch=2)
    bench.now += 2 * LEASE_S
    assert not bench.step()
    assert bench.blocks.used_blocks > 0
    bench.detach(epoch=2)
    bench.now += LEASE_S
    assert not bench.step()
    assert bench.blocks.used_blocks == 0
    assert len(bench.streams) == 0


def test_closing_a_stream_in_mid_draft_frees_it_at_once() -> None:
    """Guards against late writes into another stream's blocks and against lost credit."""
    bench = Bench(stub("stub:perfect"))
    bench.send(propose([Item(1, PROMPT)], 5, opens=(open_stream(1, PROMPT, GREEDY),)))
    bench.step()
    bench.send(propose([], 0, closed=(1,)))
    assert not bench.step()
    assert bench.blocks.used_blocks == 0
    assert bench.link.answered == 1


def test_a_newer_generation_replaces_an_outstanding_item() -> None:
    """Guards compare-and-set: one answer, for the newest generation, and the credit of both items comes back."""
    bench = Bench(stub("stub:perfect?tokens=9,8,7,6"))
    bench.send(propose([Item(1, PROMPT)], 4, opens=(open_stream(1, PROMPT, GREEDY),)))
    bench.step()
    bench.send(propose([Item(1, PROMPT, generation=1)], 2))
    bench.send(propose([Item(1, PROMPT, generation=0)], 3))
    batch = bench.run()
    assert (batch.replies.generations.tolist(), drafted(batch)) == ([1], {1: [9, 8]})
    assert bench.link.answered == 3


def test_a_repeated_item_is_not_answered_a_second_time() -> None:
    """Guards compare-and-set: a duplicate could be cut elsewhere by its deadline and say something else."""
    bench = Bench(stub("stub:perfect?tokens=9,8,7,6"))
    bench.send(propose([Item(1, PROMPT)], 4, opens=(open_stream(1, PROMPT, GREEDY),)))
    assert drafted(bench.run()) == {1: [9, 8, 7, 6]}
    bench.send(propose([Item(1, PROMPT)], 4))
    assert len(bench.run().replies) == 0
    assert bench.link.answered == 2


def test_a_late_duplicate_does_not_cut_what_a_newer_item_brought() -> None:
    """Guards the KV, and with it the acceptance, against an old item that arrives again."""
    bench = Bench(stub("stub:perfect"))
    old = propose([Item(1, [10])], 3, opens=(open_stream(1, [10], GREEDY),))
    bench.send(old)
    bench.run()
    bench.propose(propose([Item(1, [10, 11, 12, 13, 14])], 3))
    (sequence,) = bench.streams
    before = (list(sequence.tokens), sequence.cached)
    bench.send(propose([Item(1, [10])], 3))
    assert (sequence.tokens, sequence.cached) == before


def test_unknown_streams_and_lost_prefixes_are_answered_in_the_status_column() -> None:
    """Guards the coordinator's recovery after a restart of the draft."""
    bench = Bench(stub("stub:perfect"))
    bench.send(propose([Item(9, PROMPT)], 3))
    assert bench.run().replies.status(0) == Status.NOT_FOUND
    bench.send(propose([Item(1, PROMPT, base=4)], 3, opens=(open_stream(1, PROMPT, GREEDY),)))
    batch = bench.run()
    assert batch.replies.status(0) == Status.FAILED_PRECONDITION
    assert batch.replies.cached_lengths.tolist() == [0]


@pytest.mark.parametrize("kind", sorted(set(FAULTS) - {"die", "late"}))
def test_faults_on_purpose_do_what_they_say(kind: str) -> None:
    """Guards the fault injection itself: a healthy "bad" draft would let every failure test pass."""
    bench = Bench(stub("stub:perfect?tokens=9,8,7,6,5,4"), send=Faults(kind, 1, 0.0).send)
    good = bench.propose(propose([Item(1, PROMPT)], 3, opens=(open_stream(1, PROMPT, GREEDY),)))
    assert good == {1: [9, 8, 7]}
    bench.send(propose([Item(1, PROMPT, generation=1)], 3))
    batch = bench.run()
    cuts = slots_law(batch)
    ids = batch.slots.draft_ids.tolist()
    if kind in ("nan", "inf"):
        assert (cuts == Cut.MALFORMED_Q).all() and len(cuts) == 3
    elif kind == "negative":
        assert ids == [2**32 - 1] * 3
    elif kind == "oov":
        assert min(ids) > 10**6 and not cuts.any()
    elif kind in ("empty", "short"):
        assert ids == ([] if kind == "empty" else [9, 8])
    elif kind == "stale":
        assert batch.replies.committed_lengths.tolist() == [len(PROMPT) - 1]
    else:
        assert ids == [9, 8, 7, 9, 8, 7]


@pytest.mark.parametrize(("least", "slots"), [(0.0, 6), (0.95, 1), (0.85, 1), (0.8, 2), (0.7, 3), (0.5, 6)])
def test_a_greedy_draft_stops_where_it_is_no_longer_sure(least: float, slots: int) -> None:
    """The printable law gives its first choice .9: after i slots the draft believes in .9^i, and stops below `least`.

    The first slot is drafted in any case: its step has been paid for.
    """
    bench = Bench(stub("stub:perfect"))
    prompt = [65, 66]
    bench.send(propose([Item(1, prompt)], 6, opens=(open_stream(1, prompt, GREEDY),), least_survival=least))
    assert drafted(bench.run()) == {1: [67, 68, 69, 70, 71, 72][:slots]}


@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.COUPLED])
def test_a_draft_that_draws_never_stops_early(rule: Rule) -> None:
    """What it draws is accepted with the overlap of p and q, of which its first choice's probability says little.

    Exactness: where the token is drawn, whether a slot is sent must not come near what was drawn.
    """
    bench = Bench(stub("stub:perfect"))
    prompt = [65, 66]
    opens = (open_stream(1, prompt, SAMPLED, rule=rule, draft_key=1, gumbel_key=2),)
    bench.send(propose([Item(1, prompt)], 6, opens=opens, least_survival=0.99))
    assert len(drafted(bench.run())[1]) == 6
