"""`outrider plan`: sizes from configurations, times from card data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.errors import InvalidArgument, ModelUnavailable
from outrider.planning import cards
from outrider.planning.forecast import Forecast, Side
from outrider.planning.shape import load, shape

LARGE = {
    "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 25600, "vocab_size": 151936, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
SMALL = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
EXPERTS = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def forecast(**fields: Any) -> Forecast:
    target = Side(shape("target", "large", LARGE), cards.find("target-gpu", "H100"))
    draft = Side(shape("draft", "small", SMALL), cards.find("draft-gpu", "L4"))
    usual = {"target": target, "draft": draft, "acceptance": [0.8] * 8, "context": 512, "round_trip_s": 0.001}
    return Forecast(**usual | fields)


class TestShape:
    def test_parameters_of_known_models(self) -> None:
        """Guards the count: published sizes of three shapes, with tied and untied tables and with experts."""
        assert shape("t", "large", LARGE).weights_bytes / 2 == pytest.approx(32.76e9, rel=0.005)
        assert shape("t", "small", SMALL).weights_bytes / 2 == pytest.approx(0.596e9, rel=0.005)
        mixture = shape("t", "experts", EXPERTS)
        assert mixture.weights_bytes / 2 == pytest.approx(46.7e9, rel=0.005)
        assert mixture.active_params == pytest.approx(12.8e9, rel=0.02)
        assert shape("t", "large", LARGE).kv_bytes_per_token == 2 * 64 * 8 * 128 * 2

    def test_a_pass_reads_the_experts_that_were_chosen(self) -> None:
        """Guards mixtures: one row reads two of eight experts, many rows read all."""
        mixture = shape("t", "experts", EXPERTS)
        assert mixture.read_bytes(1) == pytest.approx(mixture.dense_bytes + mixture.expert_bytes / 4)
        assert mixture.read_bytes(100) == pytest.approx(mixture.dense_bytes + mixture.expert_bytes, rel=1e-6)

    def test_a_folder_with_nothing_but_a_configuration(self, tmp_path: Path) -> None:
        """Guards planning before anything is downloaded."""
        (tmp_path / "config.json").write_text(json.dumps(SMALL))
        assert load("draft", str(tmp_path), "draft").weights_source == "config"
        with pytest.raises(InvalidArgument, match="hidden_size"):
            shape("target", "x", {})
        with pytest.raises(ModelUnavailable, match=r"config\.json"):
            load("target", str(tmp_path.parent), "target")


class TestCards:
    def test_names(self) -> None:
        """Guards names as people and nvidia-smi write them, and the error that lists them."""
        assert cards.find("f", "NVIDIA H100") is cards.find("f", "h100") is cards.CARDS["H100"]
        own = cards.find("f", "mine:10:100:5")
        assert (own.memory_bytes, own.bytes_per_s, own.flops) == (10e9, 100e9, 5e12)
        for bad in ("H999", "mine:1:2", "mine:0:1:1"):
            with pytest.raises(InvalidArgument, match="f: "):
                cards.find("f", bad)


class TestForecast:
    def test_a_pass_is_bound_by_memory_and_then_by_compute(self) -> None:
        """Guards the roofline: flat for few rows, linear for many, and KV on top."""
        side = forecast().target
        assert side.pass_s(1, 0) == pytest.approx(side.pass_s(16, 0)) == pytest.approx(0.0238, rel=0.05)
        assert side.pass_s(4000, 0) == pytest.approx(2 * side.pass_s(2000, 0), rel=0.01)
        assert side.pass_s(1, 100_000) > side.pass_s(1, 0) + 0.009

    def test_break_even_round_trip(self) -> None:
        """Guards the figure that decides whether two places can work together: at it, nothing is gained."""
        at = forecast().break_even_round_trip_s(4)
        assert at > 0.001
        even = forecast(round_trip_s=at)
        assert even.ratio(4, even.best_gamma(4)) == pytest.approx(1.0, abs=1e-6)

    def test_crossover(self) -> None:
        """Guards the search: it pays just below and no longer there."""
        here = forecast()
        found = here.crossover()
        assert found is not None and found > 1
        assert here.ratio(found - 1, here.best_gamma(found - 1)) > 1 >= here.ratio(found, here.best_gamma(found))
        assert forecast(acceptance=[0.0]).crossover() == 1

    def test_link(self) -> None:
        """Guards the link's load: 1,023 bytes a proposal of five slots, as the wire's benchmark measures."""
        here = forecast()
        proposals_per_s = 8 / here.round_s(8, 5)
        assert here.q_mbit_per_s(8, 5) == pytest.approx(proposals_per_s * 1023 * 8e-6)
        assert here.feature_mbit_per_s(8, 5) == pytest.approx(proposals_per_s * 6 * 3 * 5120 * 2 * 8e-6)


class TestCommand:
    def test_the_whole_plan(self, tmp_path: Path) -> None:
        """Guards the command: every figure is there, with its source; measured acceptance replaces the assumed one."""
        for name, config in (("large", LARGE), ("small", SMALL)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        report = tmp_path / "report.json"
        report.write_text(json.dumps({"cells": [{"gamma": 2, "acceptance_given_tested": [0.9, 0.8]}]}))
        pair = ["plan", "--target", str(tmp_path / "large"), "--draft", str(tmp_path / "small")]
        done = CliRunner().invoke(app, [*pair, "--report", str(report), "--price", "target=2.5,draft=0.6", "--json"])
        assert done.exit_code == 0, done.output
        figures = json.loads(done.output)
        assert (figures["acceptance"], figures["acceptance_source"]) == ([0.9, 0.8], "measured")
        assert figures["sides"]["target"]["weights_source"] == "config"
        assert set(figures["cost_per_million_tokens"]) == {"speculative", "plain"}
        shown = CliRunner().invoke(app, pair)
        said = ("fills first", "stops paying at", "break-even", "card data", "assumed")
        assert all(text in shown.output for text in said), shown.output

    @pytest.mark.parametrize("bad", [["--alpha", "1.5"], ["--streams", "0"], ["--rtt", "-1"], ["--price", "gpu=1"]])
    def test_absurd_questions_are_refused(self, bad: list[str], tmp_path: Path) -> None:
        """Guards against forecasts of nothing."""
        (tmp_path / "config.json").write_text(json.dumps(SMALL))
        done = CliRunner().invoke(app, ["plan", "--target", str(tmp_path), "--draft", str(tmp_path), *bad])
        assert isinstance(done.exception, InvalidArgument)
