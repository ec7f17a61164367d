"""Figures of a run, under the keys of `vllm bench serve`, so that what reads its results reads these.

Failed requests are counted by class and excluded from every latency. What cannot be said is None, never NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from loadtest import slo
from loadtest.loop import Run
from loadtest.outcome import Outcome

_WHOLE_S = 0.001
"""An answer of more than two tokens whose pieces all arrive within this did not stream."""


def summarise(run: Run, *, planned: int, goodput_ms: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The figures of a run.

    Args:
        planned: requests that were to be sent.
        goodput_ms: limits by metric; with them `request_goodput` counts the answers within all of them.
    """
    outcomes, seconds = run
    good = [outcome for outcome in outcomes if outcome.failure is None]
    tokens = sum(outcome.output_tokens for outcome in good)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    failures = Counter(outcome.failure for outcome in outcomes if outcome.failure)
    details = {outcome.failure: outcome.detail for outcome in outcomes if outcome.failure}
    figures: dict[str, Any] = {
        "num_prompts": planned,
        "completed": len(good),
        "failed": failures.total(),
        "failures": dict(failures),
        "failure_details": details,
        "duration": round(seconds, 6),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": tokens,
        "request_throughput": _per(len(good), seconds),
        "output_throughput": _per(tokens, seconds),
        "total_token_throughput": _per(tokens + prompt_tokens, seconds),
        "max_send_delay_ms": _round(max((o.sent_s - o.planned_s for o in outcomes), default=0.0) * 1000),
    }
    if goodput_ms:
        figures["request_goodput"] = _per(sum(slo.is_good(outcome, goodput_ms) for outcome in good), seconds)
    buffered = arrives_whole(good)
    figures["answers_arrive_whole"] = buffered
    figures |= latencies("ttft", [o.ttft_s for o in good])
    figures |= latencies("tpot", [] if buffered else [o.tpot_s for o in good])
    figures |= latencies("itl", [] if buffered else [gap for o in good for gap in o.gaps_s])
    figures |= latencies("e2el", [o.e2el_s for o in good])
    return figures | acceptance(good)


def arrives_whole(outcomes: Sequence[Outcome]) -> bool:
    """Whether something between server and client collects answers, so that times between tokens mean nothing."""
    longer = [o for o in outcomes if o.output_tokens > 2 and o.first_s is not None]
    return bool(longer) and sum((o.decode_s or 0.0) < _WHOLE_S for o in longer) > len(longer) / 2


def latencies(name: str, seconds: Iterable[float | None]) -> dict[str, float | None]:
    """`mean_`, `median_`, `std_` and `p99_NAME_ms`."""
    known = np.array([value for value in seconds if value is not None], np.float64) * 1000
    if not len(known):
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "std", "p99")}
    return {
        f"mean_{name}_ms": _round(known.mean()),
        f"median_{name}_ms": _round(np.median(known)),
        f"std_{name}_ms": _round(known.std()),
        f"p99_{name}_ms": _round(np.percentile(known, 99)),
    }


def acceptance(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What speculation did, from the responses' own counts; empty where the server reports none.

    Rate = accepted / drafted; length = 1 + accepted / rounds; position i = rounds with more than i accepted / rounds.
    """
    reports = [outcome.speculation for outcome in outcomes if outcome.speculation]
    if not reports:
        return {}
    rounds, drafted, accepted = (
        sum(int(report.get(key) or 0) for report in reports)
        for key in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    histogram: list[int] = []
    for report in reports:
        for index, count in enumerate(report.get("acceptance_histogram") or ()):
            histogram += [0] * (index + 1 - len(histogram))
            histogram[index] += int(count)
    reached = np.cumsum(histogram[:0:-1])[::-1].tolist()
    return {
        "spec_decode_num_drafts": rounds,
        "spec_decode_num_draft_tokens": drafted,
        "spec_decode_num_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": _per(accepted, drafted),
        "spec_decode_acceptance_length": _round(1 + accepted / rounds) if rounds else None,
        "spec_decode_per_position_acceptance_rates": [_round(count / rounds) for count in reached] if rounds else [],
    }


def _per(count: float, whole: float) -> float | None:
    return _round(count / whole) if whole > 0 else None


def _round(value: float) -> float:
    return round(float(value), 6)
