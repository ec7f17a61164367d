"""Cost profiles: the fit and its curve, their correction by what is seen, and the profiler that measures them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from coordinator.cost_table import CostTable
from coordinator.costs import Costs
from coordinator.front import Front, FrontConfig
from outrider.cli import app
from outrider.costs import CostProfile, Curve, StepCost, fit_steps, isotonic
from outrider.engine import profile as profiling
from outrider.engine.block_manager import BlockManager
from outrider.engine.info import ModelInfo
from outrider.engine.profile import Profiler
from outrider.engine.profile_shapes import Bounds, shapes
from outrider.engine.profile_store import load_profile, profile_key, store_profile
from outrider.engine.stub import parse
from outrider.engine.stub_model import StubModel, load_stub
from outrider.rpc.cost_codec import costs_from_pb, costs_to_pb
from tests.scripted_decoder import ScriptedDecoder

BOUNDS = Bounds(max_num_seqs=8, max_num_batched_tokens=64, max_slots=4)


def made(fixed: float, row: float, context: float, sample: float = 0.0) -> CostProfile:
    """What a device that obeys the plane would give."""
    grid = [(b, n, length) for length in (128, 1024) for n in (1, 2, 5) for b in (1, 4, 16)]
    return CostProfile(
        tuple(StepCost(b, n, L, fixed + row * b * n + context * b * L, sample * b * n) for b, n, L in grid)
    )


class TestFit:
    def test_finds_the_plane_it_was_given(self) -> None:
        """The three numbers are what an operator reads: they must be the device's, sampling included."""
        fit = made(0.010, 0.0005, 2e-7, sample=0.0001).fit
        assert fit[:3] == pytest.approx((0.010, 0.0006, 2e-7), rel=1e-6)
        assert fit.floor_s == pytest.approx(0.010 + 0.0006 + 128 * 2e-7)

    @given(st.lists(st.floats(0.001, 1.0), min_size=18, max_size=18))
    def test_no_coefficient_is_negative_whatever_was_measured(self, seconds: list[float]) -> None:
        """A step that gets cheaper with more rows would have the controller draft without end."""
        steps = [step._replace(forward_s=value) for step, value in zip(made(1.0, 0.0, 0.0).steps, seconds, strict=True)]
        fit = fit_steps(steps)
        assert min(fit) >= 0

    @given(st.lists(st.floats(0.001, 1.0), min_size=18, max_size=18), st.integers(1, 64), st.floats(0, 8192))
    def test_curve_never_falls(self, seconds: list[float], streams: int, context: float) -> None:
        """Noise of a busy machine: `choose_gammas` takes rising costs for granted."""
        base = made(1.0, 0.0, 0.0)
        noisy = CostProfile(
            tuple(step._replace(forward_s=value) for step, value in zip(base.steps, seconds, strict=True))
        )
        curve = noisy.curve(streams, context)
        assert np.all(np.diff(curve.seconds) >= 0)
        assert np.all(np.diff(curve.rows) > 0)

    def test_curve_grows_with_the_context(self) -> None:
        profile = made(0.010, 0.0005, 1e-6)
        short, long = profile.curve(8, 100), profile.curve(8, 2000)
        assert long(8) - short(8) == pytest.approx(8 * 1900 * 1e-6, rel=0.01)

    def test_what_was_not_measured_follows_the_fit(self) -> None:
        assert made(0.010, 0.0005, 0.0).curve(16, 128)(240) == pytest.approx(0.010 + 240 * 0.0005, rel=0.01)

    @given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
    def test_isotonic_rises_and_keeps_the_mean(self, values: list[float]) -> None:
        """Pooling neighbours is the least-squares answer; a running maximum would keep every outlier for ever."""
        rising = isotonic(values)
        assert np.all(np.diff(rising) >= -1e-12)
        assert rising.mean() == pytest.approx(np.mean(values), abs=1e-9)

    def test_survives_the_wire_and_the_disk(self) -> None:
        profile = made(0.010, 0.0005, 2e-7, sample=0.0001)
        again = costs_from_pb(costs_to_pb(profile, "measured"))
        assert again is not None
        assert again.fit == pytest.approx(profile.fit)
        assert CostProfile.from_json(json.loads(json.dumps(profile.to_json())), "cache").steps == profile.steps
        assert costs_from_pb(costs_to_pb(None, "measuring")) is None


class TestCorrection:
    def test_what_is_seen_corrects_what_was_not(self) -> None:
        """A machine that is a third slower than when it was measured is so at all sizes, seen or not."""
        table = CostTable()
        table.expect(Curve(np.array([1.0, 64.0]), np.array([0.010, 0.040])))
        assert table.predict([1, 64]) == pytest.approx([0.010, 0.040])
        table.observe(8, 1.5 * float(table.predict(8)))
        assert table.predict([1, 8, 64]) == pytest.approx([0.015, 0.020, 0.060], rel=0.01)

    def test_context_that_grows_does_not_make_old_observations_wrong(self) -> None:
        """What was seen at short texts is compared with what the profile said of short texts."""
        table = CostTable()
        table.expect(Curve(np.array([1.0, 64.0]), np.array([0.010, 0.040])))
        table.observe(8, float(table.predict(8)))
        table.expect(Curve(np.array([1.0, 64.0]), np.array([0.020, 0.050])))
        assert table.predict([1, 64]) == pytest.approx([0.020, 0.050])

    def test_both_sides_know_before_the_first_request(self) -> None:
        costs = Costs()
        costs.target_profile, costs.draft_profile, costs.draft_link_s = (
            made(0.030, 0.0, 0.0),
            made(0.002, 0.0, 0),
            0.001,
        )
        assert not costs
        costs.expect(4, 128.0)
        assert costs
        assert costs.round_s(3) == pytest.approx([0.0, 0.003, 0.005, 0.007])
        assert costs.step_s(np.array([4, 20])) == pytest.approx([0.030, 0.030])

    def test_replicas_share_the_rows(self) -> None:
        costs = Costs()
        costs.replicas, costs.target_profile = 2, made(0.010, 0.001, 0.0)
        costs.expect(32, 128.0)
        assert float(costs.step_s(32)) == pytest.approx(0.026, rel=0.01)

    def test_rows_of_others_are_in_the_step_too(self) -> None:
        """Two coordinators on one target: each would think that it had the step for itself, and draft too much."""
        costs = Costs()
        costs.target_profile = made(0.010, 0.001, 0.0)
        costs.expect(8, 128.0)
        alone = float(costs.step_s(8))
        for _ in range(100):
            costs.observe_rows(24, 8)
        assert float(costs.step_s(8)) == pytest.approx(alone + 0.016, rel=0.02)


class TestProfiler:
    @pytest.fixture
    def model(self) -> StubModel:
        return load_stub(parse("stub:markov?fixed_ms=1&free_tokens=4&token_ms=0.25"))

    def profiler(self, model: StubModel, folder: Path, seconds: float = 20.0, blocks: int = 256) -> Profiler:
        return Profiler(model, BlockManager(blocks, 16), BOUNDS, seconds=seconds, folder=folder, threads=1)

    def test_measures_what_the_clock_says_and_the_next_start_reuses_it(self, model: StubModel, tmp_path: Path) -> None:
        """The second start must not spend its 20 s again."""
        first = self.profiler(model, tmp_path)
        assert first.profile is None
        while first.step() is not None:
            pass
        assert first.state == "measured"
        assert first.profile is not None
        cost = {(step.streams, step.tokens): step.forward_s for step in first.profile.steps}
        assert cost[1, 1] >= 0.001
        assert cost[8, 5] >= 0.001 + 0.00025 * 36
        second = self.profiler(model, tmp_path)
        assert second.state == "cached"
        assert second.step() is None
        assert second.profile is not None
        assert second.profile.steps == first.profile.steps

    def test_gives_every_block_back_and_measures_nothing_that_has_no_room(
        self, model: StubModel, tmp_path: Path
    ) -> None:
        """Idle work that keeps KV blocks would take them from requests."""
        blocks = BlockManager(24, 16)
        profiler = Profiler(model, blocks, BOUNDS, seconds=20.0, folder=tmp_path, threads=1)
        held: list[int] = []
        blocks.grow(held, 16 * 20)  # all but four: not even one stream of 128 tokens fits any more
        while profiler.step() is not None:
            assert blocks.free_blocks == 4
        assert profiler.state == "off"
        blocks.check_integrity([held])

    def test_stays_within_its_seconds(self, model: StubModel, tmp_path: Path) -> None:
        """A profile cut short is a profile; what is missing is filled by the fit. The clock ticks with every look."""
        ticks = itertools.count()
        profiler = Profiler(
            model,
            BlockManager(256, 16),
            BOUNDS,
            seconds=0.25,
            folder=tmp_path,
            threads=1,
            clock=lambda: 0.001 * next(ticks),
        )
        while profiler.step() is not None:
            pass
        assert profiler.profile is not None
        assert 0.25 <= profiler.profile.seconds < 0.26
        assert 6 <= len(profiler.profile.steps) < len(shapes(BOUNDS, model.info, 256))

    def test_a_machine_that_is_too_busy_is_not_judged_for_good(self, tmp_path: Path) -> None:
        """Seen: one pass of 3 s beside 25 busy processes. A flat line through it would say that rows are free."""
        slow = load_stub(parse("stub:markov?fixed_ms=510"))
        profiler = self.profiler(slow, tmp_path)
        while profiler.step() is not None:
            pass
        assert profiler.state == "off"
        assert profiler.profile is None
        assert not list(tmp_path.glob("*.json"))

    def test_off_measures_nothing_and_still_uses_what_is_kept(self, model: StubModel, tmp_path: Path) -> None:
        assert self.profiler(model, tmp_path, seconds=0).state == "off"
        store_profile(tmp_path, profile_key(model.info, 1), made(0.01, 0.001, 0.0))
        assert self.profiler(model, tmp_path, seconds=0).state == "cached"

    def test_services_of_one_device_take_turns(self, model: StubModel, tmp_path: Path) -> None:
        """Two that measure at once measure each other."""
        one, other = self.profiler(model, tmp_path), self.profiler(model, tmp_path)
        assert one.step() == 0.0
        assert other.step() == profiling.TURN_S
        one.pause()
        assert other.step() == 0.0
        other.close()

    @pytest.mark.parametrize(
        "change",
        [
            {"weight_hash": "other"},
            {"dtype": "bfloat16"},
            {"device_name": "other"},
            {"device": "cuda:0"},
            {"attention_backend": "varlen"},
            {"block_size": 256},
        ],
    )
    def test_key_changes_with_all_that_a_profile_depends_on(self, model: StubModel, change: dict[str, object]) -> None:
        """A profile of another card, or of other kernels, is worse than none."""
        other: ModelInfo = dataclasses.replace(model.info, **change)  # type: ignore[arg-type]
        assert profile_key(other, 1) != profile_key(model.info, 1)
        assert profile_key(model.info, 2) != profile_key(model.info, 1)

    def test_key_changes_with_torch(self, model: StubModel, monkeypatch: pytest.MonkeyPatch) -> None:
        before = profile_key(model.info, 1)
        monkeypatch.setattr(profiling.torch, "__version__", "0.0.0")
        assert profile_key(model.info, 1) != before

    def test_unreadable_file_counts_as_none(self, tmp_path: Path) -> None:
        (tmp_path / "key.json").write_text('{"steps": [')
        assert load_profile(tmp_path, "key") is None

    def test_shapes_fit_the_service(self, model: StubModel) -> None:
        for shape in shapes(BOUNDS, model.info, 256):
            assert shape.streams <= 8
            assert shape.streams * shape.tokens <= 64
            assert shape.tokens <= 5


class TestReport:
    def test_shows_what_the_coordinator_plans_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`outrider costs` reads the coordinator's own series: names that drift apart would show nothing at all."""
        decoder = ScriptedDecoder()
        decoder.costs.target_profile = made(0.010, 0.0005, 0.0)
        decoder.costs.expect(4, 128.0)
        decoder.costs.draft.observe(2, 0.003)
        decoder.costs.link_s = 0.001
        text = Front(decoder, FrontConfig()).metrics.render().decode()
        request = httpx.Request("GET", "http://coordinator/metrics")
        monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(200, text=text, request=request))
        shown = CliRunner().invoke(app, ["costs", "--url", "http://coordinator", "--json"])
        now = json.loads(shown.stdout)["now"]
        assert now["target_ms"]["16"] == pytest.approx(18.0, rel=0.01)
        assert now["draft_ms"]["2"] == pytest.approx(3.0)
        assert now["link_ms"] == 1.0
        assert "the way to the target and back: 1.00" in CliRunner().invoke(app, ["costs", "--url", "http://c"]).stdout
        assert 'outrider:cost_profile{side="target"} 1.0' in text
        assert 'outrider:cost_profile{side="draft"} 0.0' in text
