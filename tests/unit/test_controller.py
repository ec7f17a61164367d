"""The controller in the loop: discrete-event runs of the closed-form stub pair, with the engine's step formation."""

from __future__ import annotations

import pytest

from coordinator.auto_gamma import Auto
from coordinator.gamma import Fixed
from coordinator.probes import Probes
from outrider.economics import LinearCost, tokens_per_s
from tests.unit.simulated_pair import STEP, SimulatedPair

SLOW_STEP = LinearCost(fixed_s=0.030, token_s=0.0005, free_tokens=16)


def auto(**fields: float) -> SimulatedPair:
    return SimulatedPair(lambda costs, clock: Auto(8, costs, clock=clock), **fields)  # type: ignore[arg-type]


def fixed(gamma: int, **fields: float) -> SimulatedPair:
    return SimulatedPair(lambda costs, clock: Fixed(gamma), **fields)  # type: ignore[arg-type]


def rate(pair: SimulatedPair, streams: int, settle_s: float, seconds: float) -> float:
    pair.set_streams(streams)
    pair.run(settle_s)
    return pair.run(seconds)


@pytest.mark.parametrize("streams", [1, 8, 10, 12, 14, 15, 16, 32])
def test_throughput_is_that_of_the_best_fixed_gamma(streams: int) -> None:
    """Guards the claim that nobody has to tune gamma: within 3 % of the best of 0 .. 8 at any load."""
    best = max(range(9), key=lambda gamma: tokens_per_s(streams, gamma, 0.8, STEP, 0.001 * gamma))
    reached = rate(auto(), streams, 2.5, 5.0)
    assert reached >= 0.97 * rate(fixed(best), streams, 0.5, 2.0)
    # The way over the wire is the simulation's, not the closed form's.
    assert reached >= 0.95 * tokens_per_s(streams, best, 0.8, STEP, 0.001 * best)


@pytest.mark.parametrize(("streams", "slot_s", "proposal_s"), [(1, 0.030, 0.011), (32, 0.010, 0.011)])
def test_draft_that_does_not_pay_is_used_for_probes_only(streams: int, slot_s: float, proposal_s: float) -> None:
    """85 % acceptance and still slower (field fault 80): after 5 s at most one round in 200 drafts."""
    pair = auto(alpha=0.85, slot_s=slot_s, proposal_s=proposal_s, step=SLOW_STEP)
    pair.set_streams(streams)
    pair.run(5.0)
    rounds, drafted = pair.rounds, pair.drafted_rounds
    reached = pair.run(40.0)
    assert pair.drafted_rounds - drafted <= 0.005 * (pair.rounds - rounds)
    assert reached >= 0.99 * streams / float(SLOW_STEP(streams))


def test_draft_that_looks_slow_is_used_where_it_pays() -> None:
    """The same 11 ms + 10 ms a token beside a 30 ms target do pay for a single stream: 36 tokens/s at gamma 1 alone."""
    pair = auto(alpha=0.85, slot_s=0.010, proposal_s=0.011, step=SLOW_STEP)
    assert rate(pair, 1, 3.0, 10.0) >= 1.3 / 0.030


def test_square_wave_of_concurrency_never_falls_below_both_modes() -> None:
    """A load that crosses the crossover again and again must not make it flap (field fault 77)."""
    pair = auto()
    for _ in range(10):
        for streams in (10, 20):
            pair.set_streams(streams)
            worse = min(tokens_per_s(streams, gamma, 0.8, STEP, 0.001 * gamma) for gamma in (0, 1))
            for _ in range(3):
                assert pair.run(0.3) >= 0.8 * worse


@pytest.mark.parametrize("streams", [1, 8, 12])
def test_what_a_proposal_costs_beside_its_slots_counts(streams: int) -> None:
    """A distant draft makes deep proposals better and shallow ones worse; neither may be learnt from the other."""
    best = max(tokens_per_s(streams, gamma, 0.8, STEP, 0.006 * (gamma > 0) + 0.001 * gamma) for gamma in range(9))
    assert rate(auto(proposal_s=0.006), streams, 3.0, 5.0) >= 0.96 * best


def test_one_bad_request_is_left_out_and_the_others_go_on() -> None:
    """The breaker: at 12 streams a slot costs rows, and a stream whose tokens are never accepted gets none of them."""
    pair = auto(alpha=0.9)
    pair.set_streams(12)
    pair.run(3.0)
    bad = pair.end_and_open(alpha=0.0)
    pair.run(4.0)
    before = dict(pair.drafted)
    pair.run(4.0)
    drafted = {stream: pair.drafted[stream] - before[stream] for stream in pair.drafted}
    others = [count for stream, count in drafted.items() if stream != bad]
    assert drafted[bad] <= 0.1 * min(others)


def test_draft_that_becomes_good_is_found_out() -> None:
    """One bad stretch must not switch speculation off for good (field fault 79): a probe comes every 60 s at least.

    At 12 streams a slot must be accepted with .72 to pay, so that one accepted probe is not enough.
    """
    pair = auto(alpha=0.0)
    pair.set_streams(12)
    pair.run(20.0)
    pair.set_alpha(0.9)
    pair.run(30.0)
    assert pair.run(3.0) >= 0.95 * tokens_per_s(12, 1, 0.9, STEP, 0.001)


def test_a_bad_request_is_tried_again_ever_more_rarely() -> None:
    """The breaker's pauses double: without them a stream that never pays gets a few slots every second for good."""
    pair = auto(alpha=0.9)
    pair.set_streams(12)
    pair.run(3.0)
    bad = pair.end_and_open(alpha=0.0)
    pair.run(20.0)
    before = pair.drafted[bad]
    pair.run(20.0)
    assert pair.drafted[bad] - before <= 30


def test_probes_are_paid_for_before_the_next_one() -> None:
    """Probes that leave the draft a chance do not double the pause, so only their share of the time bounds them."""
    now_s = [100.0]
    probes = Probes(lambda: now_s[0])
    probes.began(1, cost_s=0.05, round_s=0.02)
    assert not probes.due, "one is under way"
    probes.ended(again=True, promising=True)
    assert probes.due, "a chain goes on at once"
    probes.began(1, cost_s=0.05, round_s=0.02)
    probes.ended(again=False, promising=True)
    now_s[0] += 0.99 * 2 * 0.05 / 0.005
    assert not probes.due
    now_s[0] += 0.02 * 2 * 0.05 / 0.005
    assert probes.due
