"""The change test on acceptance: false alarms and delays as it states them, by simulation with fixed seeds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from outrider import drift
from outrider.drift import BLOCK_ROUNDS, LEARN_BLOCKS, LIMIT, Baseline, Drift, Known
from tests.unit.tiny import tiny_llama

UNIT = Baseline(0.0, 1.0)


def first_alarms(means: NDArray[np.float64]) -> NDArray[np.int64]:
    """[runs] number of the block that raises the alarm, -1 for none; `means` is [runs, blocks], in sd above mu.

    The recursion of `drift.step`, for all runs at once; one of them is compared with it.
    """
    statistic = np.zeros(len(means))
    alarm = np.full(len(means), -1)
    for block in range(means.shape[1]):
        statistic = np.clip(statistic - means[:, block] - drift.SLACK, 0, LIMIT)
        alarm[(statistic >= LIMIT) & (alarm < 0)] = block + 1
    return alarm


def test_the_vectorised_simulation_is_the_test_itself() -> None:
    means = np.random.default_rng(1).normal(-1.5, 1, (1, 40))
    statistics = [0.0]
    for mean in means[0].tolist():
        statistics.append(drift.step(statistics[-1], UNIT, mean))
    assert first_alarms(means)[0] == statistics.index(LIMIT) > 1


@pytest.mark.parametrize(("drop", "stated"), [(2.0, 7.0), (3.0, 4.0)])
def test_delay_is_as_stated(drop: float, stated: float) -> None:
    alarms = first_alarms(np.random.default_rng(2).normal(-drop, 1, (2000, 60)))
    assert (alarms > 0).all()
    assert drift.run_length(drop) == pytest.approx(stated, abs=0.1)
    assert alarms.mean() == pytest.approx(drift.run_length(drop), rel=0.1)


def test_false_alarms_are_as_rare_as_stated() -> None:
    """At twice the error that mu has after learning; the plain rate is too low to be simulated."""
    assert drift.run_length(0.0) > 800_000
    assert drift.run_length(0.2) > 39_000
    runs, blocks = 2000, 500
    alarms = first_alarms(np.random.default_rng(3).normal(-0.2, 1, (runs, blocks)))
    # Alarms come as a Poisson process: runs * blocks / 39,000 = 25.6 expected, sd 5.1.
    assert 8 <= (alarms > 0).sum() <= 43
    planted = first_alarms(np.random.default_rng(3).normal(-0.6, 1, (runs, blocks)))
    assert (planted > 0).sum() > 1000  # the count does see a baseline that is wrong


def test_false_alarms_with_what_is_learnt_are_as_stated() -> None:
    rng, runs = np.random.default_rng(8), 4000
    blocks = rng.normal(0, 1, (runs, LEARN_BLOCKS))
    mean, sd = blocks.mean(axis=1, keepdims=True), blocks.std(axis=1, ddof=1, keepdims=True)
    share = (first_alarms((rng.normal(0, 1, (runs, 1000)) - mean) / sd) > 0).mean()
    assert share == pytest.approx(0.01, abs=0.005)


def feed(test: Drift, shares: NDArray[np.float64], rng: np.random.Generator) -> None:
    """Rounds with these chances of acceptance."""
    for accepted in (rng.random(len(shares)) < shares).tolist():
        test.add(accepted)


def answers(rng: np.random.Generator, share: float, rounds: int) -> NDArray[np.float64]:
    """Chances of rounds in which every 32 are of one answer, and answers differ in how well they are guessed."""
    return np.repeat(np.clip(rng.normal(share, 0.1, rounds // 32), 0, 1), 32)


class TestRounds:
    def test_a_drop_is_seen_and_its_end_too(self) -> None:
        rng, test = np.random.default_rng(4), Drift()
        feed(test, answers(rng, 0.7, LEARN_BLOCKS * BLOCK_ROUNDS), rng)
        baseline = test.baseline
        assert baseline is not None and baseline.mean == pytest.approx(0.7, abs=0.02)
        assert baseline.sd > 1.2 * drift.independent_sd(0.7)  # answers that differ were taken into account
        feed(test, answers(rng, 0.7, 100 * BLOCK_ROUNDS), rng)
        assert not test.drifted
        feed(test, answers(rng, 0.55, 10 * BLOCK_ROUNDS), rng)
        assert test.drifted
        assert test.view.drop == pytest.approx(0.15, abs=0.05)
        feed(test, answers(rng, 0.7, 40 * BLOCK_ROUNDS), rng)
        assert not test.drifted

    def test_more_acceptance_is_no_alarm(self) -> None:
        rng, test = np.random.default_rng(5), Drift(drift.given(0.5))
        feed(test, answers(rng, 0.8, 20 * BLOCK_ROUNDS), rng)
        assert not test.drifted and test.view.drop < -0.2

    def test_a_given_baseline_needs_no_learning(self) -> None:
        rng, test = np.random.default_rng(6), Drift(drift.given(0.8))
        feed(test, answers(rng, 0.5, 5 * BLOCK_ROUNDS), rng)
        assert test.drifted

    def test_a_baseline_without_any_variance_is_not_taken_at_its_word(self) -> None:
        test = Drift()
        for _ in range(LEARN_BLOCKS * BLOCK_ROUNDS):
            test.add(True)
        assert test.baseline is not None and test.baseline.sd == drift.independent_sd(1.0) > 0

    def test_nothing_is_said_while_learning(self) -> None:
        test = Drift()
        ended = [test.add(False) for _ in range(2 * BLOCK_ROUNDS)]
        assert sum(ended) == 2 and ended[BLOCK_ROUNDS - 1]
        assert test.view == (None, None, False) and test.view.drop == 0


def test_mean_and_deviation_are_those_of_the_blocks() -> None:
    means = np.random.default_rng(7).normal(0.6, 0.2, 50)
    known = Known()
    for mean in means.tolist():
        known = drift.learn(known, mean)
    assert drift.learnt(known) == pytest.approx((means.mean(), means.std(ddof=1)))


@torch.inference_mode()
def test_a_target_with_a_perturbed_last_layer_is_noticed(tmp_path: Path) -> None:
    """Guards the purpose: post-training the target is seen after the stated delay, and nothing is for ten times that.

    The draft is the target with some noise in its last layer, the post-trained target has more of it. A position's
    chance of acceptance is sum min(p, q), and 32 rounds are of one text.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(9)
    original = tiny_llama(tmp_path, vocab=64, layers=2, hidden=32, scale=4.0)

    def perturbed(strength: float) -> torch.nn.Module:
        network = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
        for weight in network.model.layers[-1].parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * strength * weight.std(correction=0))
        return network

    target, draft, trained = perturbed(0.0), perturbed(0.5), perturbed(1.0)

    def shares(served: torch.nn.Module, blocks: int) -> NDArray[np.float64]:
        texts = torch.randint(64, (blocks * BLOCK_ROUNDS // 32, 32), generator=generator)
        p, q = (network(texts).logits.softmax(-1) for network in (served, draft))
        return torch.minimum(p, q).sum(-1).flatten().double().numpy()

    rng, test = np.random.default_rng(10), Drift()
    feed(test, shares(target, LEARN_BLOCKS), rng)
    baseline = test.baseline
    assert baseline is not None
    after = shares(trained, 40)
    drop = (baseline.mean - after.mean()) / baseline.sd
    assert drop > 2, "worth noticing"
    delay = math.ceil(drift.run_length(drop))
    for block in shares(target, 10 * delay).reshape(10 * delay, BLOCK_ROUNDS):
        feed(test, block, rng)
        assert not test.drifted
    for block in after[: 2 * delay * BLOCK_ROUNDS].reshape(2 * delay, BLOCK_ROUNDS):
        feed(test, block, rng)
    assert test.drifted, (drop, delay)
