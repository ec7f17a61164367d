"""The gamma controller against a simulated pair: what it chooses at which load, and what its probes cost."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from coordinator.auto_gamma import Auto
from coordinator.cost_table import CostTable
from coordinator.costs import Costs
from coordinator.gamma import BySize, Fixed, SizeRange, size_ranges
from coordinator.probes import PROBE_SHARE
from coordinator.schedule import read_schedule
from outrider.economics import LinearCost, expected_tokens, tokens_per_s
from outrider.errors import InvalidArgument


@dataclass
class Pair:
    """The stub pair of the performance notes on a simulated clock: all streams step together.

    A target step takes 10 ms for up to 16 rows and 0.5 ms for each further one, a drafted slot 1 ms whatever the batch.
    """

    acceptance: float = 0.8
    slot_s: float = 0.001
    per_stream: dict[int, float] = field(default_factory=dict)
    now_s: float = 0.0
    expected_tokens: float = 0.0
    drafting_s: float = 0.0

    def __post_init__(self) -> None:
        self.costs = Costs()
        self.auto = Auto(8, self.costs, clock=lambda: self.now_s)
        self.random = np.random.default_rng(1)

    def round(self, streams: range) -> list[int]:
        """One joint round; returns the gammas chosen."""
        ids = list(streams)
        gammas = self.auto.choose(ids, [8] * len(ids))
        rows = len(ids) + sum(gammas)
        step_s = 0.010 + 0.0005 * max(0, rows - 16)
        deepest = max(gammas)
        if deepest:
            self.costs.draft.observe(deepest, self.slot_s * deepest)
            self.drafting_s += self.slot_s * deepest
        self.costs.target.observe(rows, step_s)
        self.now_s += step_s + self.slot_s * deepest
        for stream_id, gamma in zip(ids, gammas, strict=True):
            alpha = self.per_stream.get(stream_id, self.acceptance)
            rejected = np.flatnonzero(self.random.random(gamma) >= alpha)
            accepted = int(rejected[0]) if len(rejected) else gamma
            self.expected_tokens += expected_tokens(alpha, gamma)
            self.auto.finished(stream_id, gamma, gamma, accepted)
        return gammas

    def settle(self, streams: int, rounds: int = 250) -> list[list[int]]:
        """The gammas of the last hundred rounds."""
        return [self.round(range(streams)) for _ in range(rounds)][-100:]


class TestFixed:
    def test_asks_for_its_number_within_the_streams_limit(self) -> None:
        """A limit is what is left of max_tokens or context: more slots would be thrown away."""
        assert Fixed(4).choose([1, 2, 3], [8, 2, 0]) == [4, 2, 0]


class TestBySize:
    RANGES = size_ranges([[1, 7, 4], [8, 14, 1], [20, 64, 0]], 8)

    @pytest.mark.parametrize(("streams", "gamma"), [(0, 4), (1, 4), (7, 4), (8, 1), (14, 1), (17, 1), (20, 0), (99, 0)])
    def test_takes_the_range_that_the_load_falls_into(self, streams: int, gamma: int) -> None:
        """A table that is read and silently not used is worse than none (field fault 78)."""
        table = BySize(self.RANGES, lambda: streams)
        assert table.choose([1, 2], [8, 2]) == [gamma, min(gamma, 2)]
        assert table.wants(1) == (gamma > 0)

    @pytest.mark.parametrize(
        "table",
        [{"x": 3}, [], [[1, 4]], [[1, 4, 2.0]], [[1, 4, True]], [[2, 4, 1]], [[1, 4, 9]], [[1, 4, 2], [4, 8, 1]]],
    )
    def test_refuses_a_table_that_makes_no_sense(self, table: object) -> None:
        with pytest.raises(InvalidArgument, match="num_speculative_tokens_per_batch_size"):
            size_ranges(table, 8)

    def test_reads_what_the_sweep_writes(self, tmp_path: Path) -> None:
        """`outrider up --schedule` starts from the file that `outrider bench sweep` leaves."""
        path = tmp_path / "schedule.json"
        path.write_text(json.dumps({"num_speculative_tokens_per_batch_size": [[1, 8, 4]], "target": "any"}))
        assert read_schedule(path, 8) == (SizeRange(1, 8, 4),)
        path.write_text("[[1, 8, 4]]")
        with pytest.raises(InvalidArgument, match="has no num_speculative_tokens_per_batch_size"):
            read_schedule(path, 8)


class TestAuto:
    @pytest.mark.parametrize(("streams", "low", "high"), [(1, 4, 8), (12, 0.3, 2), (24, 0, 0.3)])
    def test_choice_follows_the_load_though_acceptance_does_not_change(
        self, streams: int, low: float, high: float
    ) -> None:
        """Acceptance is the wrong signal: the best gamma falls from many to none with load (field fault 76)."""
        mean = float(np.mean(Pair().settle(streams)))
        assert low <= mean <= high

    @pytest.mark.parametrize("streams", [1, 8, 32])
    def test_throughput_is_near_the_best_fixed_gamma(self, streams: int) -> None:
        """Whatever the load, nobody should have to tune gamma by hand."""
        pair = Pair()
        pair.settle(streams, 150)
        before, since_s = pair.expected_tokens, pair.now_s
        pair.settle(streams, 150)
        rate = (pair.expected_tokens - before) / (pair.now_s - since_s)
        step = LinearCost(0.010, 0.0005, 16)
        best = max(tokens_per_s(streams, gamma, 0.8, step, 0.001 * gamma) for gamma in range(9))
        assert rate >= 0.95 * best

    def test_slow_draft_is_not_asked(self) -> None:
        """85 % acceptance and still slower: the draft's cost must be compared with the target's (field fault 80)."""
        pair = Pair(acceptance=0.85, slot_s=0.021)
        assert np.mean(pair.settle(1)) < 0.05

    def test_recovers_after_a_bad_draft_became_a_good_one(self) -> None:
        """One bad stretch must not switch speculation off for good (field fault 79)."""
        pair = Pair(acceptance=0.0)
        assert np.mean(pair.settle(1, 300)) < 0.05
        pair.acceptance = 0.95
        rounds = 0
        while pair.round(range(1))[0] < 4:
            rounds += 1
            assert pair.now_s < 200, "gamma never came back"
        # The pause between probes, at most 60 s, and a few rounds.
        assert rounds * 0.010 < 65

    def test_one_bad_stream_does_not_lower_the_others(self) -> None:
        """Estimates are kept per stream: rows are not free at this load, and the bad stream does not get any."""
        pair = Pair(acceptance=0.95, per_stream={0: 0.02})
        last = np.mean(pair.settle(12), axis=0)
        assert last[0] < 0.3
        assert min(last[1:]) > 0.7

    def test_probes_cost_at_most_their_share(self) -> None:
        """At gamma = 0 speculation must be nearly free (field fault 78)."""
        pair = Pair(acceptance=0.0)
        pair.settle(1, 100)
        spent_s, since_s = pair.drafting_s, pair.now_s
        pair.settle(1, 4_000)
        assert pair.drafting_s - spent_s <= PROBE_SHARE * (pair.now_s - since_s)

    @pytest.mark.parametrize(("every", "asked"), [(20, True), (None, False)])
    def test_a_draft_that_seldom_speaks_is_asked_as_long_as_it_ever_does(self, every: int | None, asked: bool) -> None:
        """Guards prompt lookup: an empty proposal costs a hop, and must not count like a slot verified and rejected.

        A draft that never has anything to say is given up all the same.
        """
        pair = Pair()
        gammas = []
        for number in range(600):
            gamma = pair.auto.choose([0], [8])[0]
            proposed = min(gamma, 1) if every is not None and number % every == 0 else 0
            pair.costs.draft.observe(max(gamma, 1), pair.slot_s)
            pair.costs.target.observe(1 + proposed, 0.010)
            pair.now_s += 0.010
            pair.auto.finished(0, gamma, proposed, proposed)
            gammas.append(gamma)
        assert (np.mean(np.array(gammas[-200:]) > 0) > 0.9) == asked

    @pytest.mark.parametrize(("streams", "low", "high"), [(1, 0.2, 0.3), (24, 0.0, 0.0)])
    def test_a_slot_must_be_worth_its_time(self, streams: int, low: float, high: float) -> None:
        """What a draft may stop at: 1 ms of drafting at 247 tokens/s for one stream, whose rows are free."""
        pair = Pair()
        pair.settle(streams, 300)
        assert low <= pair.auto.least_survival <= high

    def test_first_rounds_show_what_different_gammas_cost(self) -> None:
        """Seen: 8 streams went from plain rounds (8 rows) to four drafted tokens (40 rows) and stayed there, because on
        the line between the two a single one (16 rows, really as cheap as 8) looked no better."""
        pair = Pair()
        pair.costs.target.observe(8, 0.010)
        first = [pair.round(range(8)) for _ in range(10)]
        assert [max(gammas) for gammas in first[:3]] == [4, 1, 2]
        assert first[-1] == [1] * 8

    def test_plan_does_not_flap_at_the_crossover(self) -> None:
        """Changing back and forth pays for both modes (field fault 77)."""
        plans = [sum(gammas) for gammas in Pair().settle(13, 400)]
        changes = sum(abs(a - b) > 2 for a, b in pairwise(plans))
        assert changes <= 20

    def test_plain_stream_is_called_in_only_for_a_probe(self) -> None:
        """A plain run is interrupted for one stream, not for all of them at once."""
        pair = Pair(acceptance=0.0)
        pair.settle(4, 400)
        assert not any(pair.auto.wants(stream_id) for stream_id in range(4))
        pair.now_s += 120
        assert [pair.auto.wants(stream_id) for stream_id in range(4)] == [True, False, False, False]

    def test_forgets_streams_that_ended(self) -> None:
        pair = Pair()
        pair.settle(8, 10)
        for stream_id in range(8):
            pair.auto.forget(stream_id)
        assert len(pair.auto.acceptance()) == 0


class TestCostTable:
    def test_small_sizes_teach_nothing_about_large_ones(self) -> None:
        """Small-batch data that pollutes the large-batch choice (field fault 79)."""
        table = CostTable()
        for _ in range(100):
            table.observe(64, 0.064)
            table.observe(1, 0.010)
        assert table.predict([1, 64]) == pytest.approx([0.010, 0.064])

    def test_never_falls_with_size_and_goes_on_beyond_what_was_seen(self) -> None:
        """`choose_gammas` refuses costs that fall with depth."""
        table = CostTable()
        for size, seconds in ((1, 0.010), (4, 0.008), (8, 0.018)):
            table.observe(size, seconds)
        predicted = table.predict(np.arange(1, 20))
        assert np.all(np.diff(predicted) >= 0)
        assert predicted[-1] > 0.018

    def test_bound_covers_what_usually_happens(self) -> None:
        """A proposal is overdue beyond a multiple of this; a bound at the mean would call half of them late."""
        table, random = CostTable(), np.random.default_rng(1)
        seen = 0.010 + 0.004 * random.random(500)
        for seconds in seen:
            table.observe(4, seconds)
        assert np.mean(seen <= table.bound(4)) > 0.95
