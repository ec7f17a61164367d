"""Stub models: names, laws and clock, as documented in `outrider.engine.stub`."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.engine.batch import Span
from outrider.engine.config import EngineConfig
from outrider.engine.laws import MarkovLaw, printable_table
from outrider.engine.logits import RowContext, greedy, process
from outrider.engine.stub import FAULTS, Clock, parse
from outrider.engine.stub_model import load_stub
from outrider.errors import InvalidArgument
from outrider.sampling import SamplingParams

EOS = 257


def span(
    tokens: list[int], *, start: int = 0, wanted: int = 1, prompt_len: int = 2, committed: int = 2, stream_id: int = 1
) -> Span:
    return Span(stream_id, tokens, start, wanted, [], prompt_len, committed)


def p_of(name: str, *spans: Span) -> np.ndarray:
    logits = load_stub(parse(name)).forward(spans)
    context = RowContext(SamplingParams(), [0], 1, 1)
    return process(logits, [context] * len(logits)).p.numpy()


def argmax_of(name: str, *spans: Span) -> list[int]:
    return p_of(name, *spans).argmax(axis=1).tolist()


def table_file(folder: Path, table: list[list[float]]) -> Path:
    path = folder / "table.json"
    path.write_text(json.dumps(table))
    return path


def test_a_script_goes_by_generated_index_whatever_was_accepted():
    """Guards SCRIPT: rows follow position - prompt length, not the tokens fed, and EOS follows for ever."""
    name = "stub:script?tokens=5,6,7&eos=2"
    assert argmax_of(name, span([9, 9, 99, 98, 97, 96], wanted=5)) == [5, 6, 7, 2, 2]
    assert argmax_of(name, span([1], start=3, prompt_len=2), span([1, 1, 1], prompt_len=3)) == [7, 5]


def test_a_script_is_certain_at_any_temperature_and_survives_masks():
    """Guards rows that a mask would leave without any finite logit, as min_tokens does to a script that ends early."""
    logits = load_stub(parse("stub:script?tokens=5&eos=2")).forward([span([1, 1, 5])])
    hot = RowContext(SamplingParams(temperature=100.0), [1, 1, 5], 3, 2)
    assert process(logits, [hot]).p[0, 2] == 1
    held = RowContext(SamplingParams(temperature=0, stop_token_ids=(2,), min_tokens=5), [1, 1, 5], 3, 2)
    choice = greedy(logits, [held])
    assert not choice.faults and choice.ids.tolist() == [0]


def test_the_law_without_a_table_is_the_documented_one():
    """Guards the numbers that tests over the whole system are computed from."""
    table = printable_table()
    assert table.shape == (258, 258)
    np.testing.assert_allclose(table.sum(axis=1), 1)
    for last, following in ((ord("a"), ord("b")), (ord("~"), ord(" ")), (0, ord(" ")), (EOS, ord(" ")), (31, 32)):
        assert table[last, following] == 0.9
        assert np.count_nonzero(table[last]) == 95
    assert not table[:, 127:].any() and not table[:, :32].any()
    p = p_of("stub:markov", span([1, ord("a")]))
    np.testing.assert_allclose(p[0], table[ord("a")], rtol=1e-6)


def test_a_table_gives_its_rows(tmp_path: Path):
    """Guards MARKOV: the law depends on the last token alone, zeros stay zeros."""
    path = table_file(tmp_path, [[0.5, 0.3, 0.2], [0.0, 1.0, 0.0], [0.25, 0.25, 0.5]])
    p = p_of(f"stub:markov?table={path}", span([0, 1, 2, 0], wanted=4))
    np.testing.assert_allclose(p, [[0.5, 0.3, 0.2], [0, 1, 0], [0.25, 0.25, 0.5], [0.5, 0.3, 0.2]], rtol=1e-6)
    info = load_stub(parse(f"stub:markov?table={path}")).info
    assert (info.vocab_rows, info.eos_token_ids) == (3, ())


@pytest.mark.parametrize("law", ["tokens=5,6,7&eos=2", "eos=257", ""])
def test_perfect_is_the_target_and_wrong_never_is(law: str):
    """Guards the drafts that every acceptance test rests on."""
    target = "stub:script?" + law if "tokens" in law else "stub:markov?" + law
    fed = span([ord("a"), ord("b"), ord("c")], wanted=3)
    np.testing.assert_array_equal(p_of("stub:perfect?" + law, fed), p_of(target, fed))
    p, wrong = p_of(target, fed), argmax_of("stub:wrong?" + law, fed)
    assert all(p[i, wrong[i]] == 0 for i in range(3))
    assert not {2, EOS} & set(wrong)


def test_wrong_is_the_least_likely_where_nothing_is_impossible(tmp_path: Path):
    """Guards small tables without zeros; EOS is the last resort among equals."""
    path = table_file(tmp_path, [[0.2, 0.2, 0.6], [0.4, 0.5, 0.1], [0.5, 0.25, 0.25]])
    assert argmax_of(f"stub:wrong?table={path}&eos=0", span([0, 1, 2], wanted=3)) == [1, 2, 1]


def test_accept_k_is_right_for_the_first_k_slots_of_each_round():
    """Guards the slot count: it starts at the committed length, not at the fed tokens."""
    name = "stub:accept?k=2&tokens=5,6,7,8,9&eos=3"
    assert argmax_of(name, *(span([0], start=1 + i, committed=2) for i in range(4))) == [5, 6, 0, 0]
    assert argmax_of(name, *(span([0], start=2 + i, committed=3) for i in range(3))) == [6, 7, 0]


def test_accept_p_tosses_its_own_coin_by_stream_and_position():
    """Guards closed-form acceptance: independent slots with chance p, and the same ones on a retry."""
    name, n = "stub:accept?p=0.8&tokens=5&eos=5", 4000
    ids = random.Random(2)
    spans = [span([0], start=i % 50, committed=1, stream_id=ids.getrandbits(64)) for i in range(n)]
    right = np.array(argmax_of(name, *spans)) == 5
    assert abs(right.mean() - 0.8) < 4 * (0.16 / n) ** 0.5
    assert abs(np.corrcoef(right[1:], right[:-1])[0, 1]) < 4 / n**0.5
    retried = [one._replace(committed=0) for one in spans]
    np.testing.assert_array_equal(np.array(argmax_of(name, *retried)) == 5, right)


def test_accept_p_ends_of_the_range():
    """Guards p = 0 and p = 1, where no coin may decide."""
    spans = [span([0], start=i) for i in range(1, 200)]
    assert set(argmax_of("stub:accept?p=1&tokens=5&eos=5", *spans)) == {5}
    assert set(argmax_of("stub:accept?p=0&tokens=5&eos=5", *spans)) == {0}


def test_a_draft_table_has_a_law_of_its_own(tmp_path: Path):
    """Guards table(Q), which must not follow the target."""
    path = table_file(tmp_path, [[0.2, 0.5, 0.3]] * 3)
    np.testing.assert_allclose(p_of(f"stub:table?file={path}", span([1])), [[0.2, 0.5, 0.3]], rtol=1e-6)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_draft_is_a_perfect_one_with_a_fault_to_apply(fault: str):
    """Guards the split of work: the model is sound, the service spoils what it proposes."""
    spec = parse(f"stub:bad?kind={fault}&after=3&ms=50&tokens=5&eos=5")
    assert (spec.fault, spec.after, spec.late_ms, spec.is_draft) == (fault, 3, 50.0, True)
    assert load_stub(spec).forward([span([0])]).argmax() == 5


def test_a_targets_step_costs_what_its_clock_says():
    """Guards the closed form that the crossover is checked against: 10 ms up to 16 rows, then .5 ms each."""
    model = load_stub(parse("stub:markov?fixed_ms=10&free_tokens=16&token_ms=0.5&prefill_token_ms=0.25"))

    def verify(gamma: int) -> Span:
        return span([0] * (gamma + 1), start=40, wanted=gamma + 1, prompt_len=8, committed=41)

    assert model.step_ms([verify(4)] * 3) == 10
    assert model.step_ms([verify(4)] * 32) == 10 + 0.5 * (160 - 16)
    assert model.step_ms([span([0] * 100, wanted=1, prompt_len=100)]) == 10 + 0.25 * 100
    assert model.step_ms([span([0] * 104, wanted=5, prompt_len=100)]) == 10 + 0.25 * 100
    assert model.step_ms([span([0] * 104, wanted=1, prompt_len=2)] * 20) == 10 + 0.5 * 4 + 0.25 * 103 * 20


def test_a_draft_pays_per_slot_whatever_the_batch():
    """Guards the draft's side of the closed form; feeding tokens without drafting costs nothing."""
    model = load_stub(parse("stub:perfect?token_ms=1.5"))
    assert model.step_ms([span([0] * 9)] * 50) == 1.5
    assert model.step_ms([span([0] * 9, wanted=0)]) == 0


def test_a_step_takes_its_time():
    """Guards against a clock that only counts."""
    model = load_stub(parse("stub:markov?fixed_ms=30"))
    started = time.monotonic()
    assert model.forward([span([0])]).shape == (1, 258)
    assert time.monotonic() - started >= 0.03


def test_a_step_that_only_prefills_has_no_rows():
    """Guards pieces of a prompt."""
    assert load_stub(parse("stub:markov")).forward([span([0] * 5, wanted=0)]).shape == (0, 258)


def test_limits_come_from_the_engines_configuration():
    """Guards KV accounting: the pool and block size of a stub are those that were asked for."""
    config = EngineConfig(model="stub:markov", max_model_len=100, block_size=32, kv_cache_tokens=3200)
    model = load_stub(parse("stub:markov"), config)
    assert (model.num_blocks, model.info.block_size, model.info.max_positions) == (100, 32, 100)
    assert load_stub(parse("stub:script?tokens=1&vocab=9")).info.eos_token_ids == (8,)
    assert torch.get_num_threads() == 1


def test_names_are_read_whole():
    """Guards every key."""
    spec = parse("stub:script?tokens=5,6&eos=2&vocab=10&fixed_ms=1.5&free_tokens=4&token_ms=2&prefill_token_ms=.5")
    assert (spec.kind, spec.tokens, spec.eos, spec.vocab) == ("script", (5, 6), 2, 10)
    assert spec.clock == Clock(1.5, 4, 2.0, 0.5)
    assert parse("stub:markov?table=a%26b.json").table == Path("a&b.json")
    assert not parse("stub:markov").is_draft


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("markov", "is no stub"),
        ("stub:", "is no stub"),
        ("stub:bytes", "is no stub"),
        ("stub:markov?speed=3", "no key 'speed'; it takes table, eos"),
        ("stub:perfect?fixed_ms=3", "no key 'fixed_ms'"),
        ("stub:markov?eos", "eos needs one value"),
        ("stub:markov?eos=1&eos=2", "eos needs one value"),
        ("stub:script", "needs tokens="),
        ("stub:script?tokens=1,x", "tokens=1,x is not a whole number"),
        ("stub:script?tokens=-1", "not a whole number"),
        ("stub:script?tokens=1&vocab=0", "must be positive"),
        ("stub:markov?fixed_ms=-1", "from 0 to inf"),
        ("stub:markov?fixed_ms=nan", "from 0 to inf"),
        ("stub:markov?fixed_ms=soon", "is not a number"),
        ("stub:accept", "either k= or p="),
        ("stub:accept?k=1&p=0.5", "either k= or p="),
        ("stub:accept?p=1.5", "from 0 to 1"),
        ("stub:table", "needs file="),
        ("stub:bad", "needs kind="),
        ("stub:bad?kind=ugly", "is not one of nan, inf"),
        ("stub:perfect?tokens=1&table=x", "only one"),
    ],
)
def test_names_that_cannot_be_meant_are_refused(name: str, problem: str):
    """Guards against a misspelt key that quietly means the default."""
    with pytest.raises(InvalidArgument, match="model: ") as caught:
        parse(name)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("nonsense", "not a JSON list"),
        ('{"a": 1}', "not a JSON list"),
        ("[[1, 0], [1]]", "not a JSON list"),
        ("[[0.5, 0.5]]", "must be V x V"),
        ("[]", "must be V x V"),
        ("[[0.5, 0.4], [1, 0]]", "no distribution"),
        ("[[1.5, -0.5], [1, 0]]", "no distribution"),
        ("[[NaN, 1], [1, 0]]", "no distribution"),
    ],
)
def test_tables_that_are_no_laws_are_refused(tmp_path: Path, content: str, problem: str):
    """Guards against a law that the tests' arithmetic does not know."""
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=problem):
        load_stub(parse(f"stub:markov?table={path}"))


def test_ids_outside_the_vocabulary_and_missing_files_are_refused(tmp_path: Path):
    """Guards the start: a stub that cannot work must not start."""
    with pytest.raises(InvalidArgument, match="id 300 is outside"):
        load_stub(parse("stub:script?tokens=300"))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load_stub(parse(f"stub:markov?table={tmp_path / 'none.json'}"))
    with pytest.raises(InvalidArgument, match="eos 5 is outside"):
        MarkovLaw(np.eye(3), eos=5)
