"""What a sweep means, in sentences that need no glossary."""

from __future__ import annotations

import math
from collections.abc import Mapping

from loadtest.analysis import Analysis, Measured, device_costs
from loadtest.crossover import Crossover

_SURE = 0.02
"""A ratio whose interval reaches further than this across 1 is called neither gain nor loss."""


def verdict(analysis: Analysis, prices: Mapping[str, float], *, has_draft_device: bool) -> list[str]:
    """Where it pays, up to which load, what it costs beyond, how busy the draft device is, and what a token costs."""
    if not analysis.measured:
        return ["Nothing was measured."]
    context = analysis.contexts[0]
    arms = [one for one in analysis.measured.values() if one.cell.context == context and one.cell.gamma != 0]
    if not arms:
        return ["Only plain decoding was measured; a sweep needs a gamma above 0 to compare with it."]
    best = max(arms, key=lambda one: one.ratio)
    paying = [one for one in arms if one.ratio_ci.low > 1 - _SURE and one.ratio > 1]
    if not paying:
        lines = [_does_not_pay(best, analysis)]
    else:
        best = max(paying, key=lambda one: one.ratio)
        lines = [
            f"Speculation pays most at {_streams(best.cell.batch)}: {_times(best)} the tokens per second of plain "
            f"decoding, with gamma {best.cell.gamma}."
        ]
    lines += _busy(best)
    lines += _price(analysis, best, prices, has_draft_device=has_draft_device)
    lines += [_crossover(str(gamma), found) for gamma, found in analysis.crossovers.get(context, {}).items()]
    worst = min(arms, key=lambda one: one.ratio)
    if worst.ratio < 1:
        lines.append(
            f"Beyond, it costs: gamma {worst.cell.gamma} at {_streams(worst.cell.batch)} reaches {_times(worst)} "
            "of plain decoding."
        )
    return lines


def _does_not_pay(best: Measured, analysis: Analysis) -> str:
    plain = analysis.measured[best.cell._replace(gamma=0)]
    costs = ""
    if best.steps and plain.steps:
        costs = (
            f" A proposal takes {best.steps.draft_ms:.1f} ms and its verification {best.steps.step_ms:.1f} ms, a plain "
            f"step {plain.steps.step_ms:.1f} ms."
        )
    return (
        f"Speculation does not pay here: at best {_times(best)} of plain decoding (gamma {best.cell.gamma}, "
        f"{_streams(best.cell.batch)}).{costs}"
    )


def _crossover(gamma: str, found: Crossover) -> str:
    name = "The server's own choice of gamma" if gamma == "auto" else f"Gamma {gamma}"
    if math.isinf(found.batch):
        return f"{name} pays at every batch up to {found.largest}, the largest that was measured."
    if found.batch == 0:
        return f"{name} pays at no batch from {found.smallest} to {found.largest}."
    low = f"{found.interval.low:.1f}" if found.interval.low else f"under {found.smallest}"
    high = f"over {found.largest}" if math.isinf(found.interval.high) else f"{found.interval.high:.1f}"
    return f"{name} pays up to {found.batch:.1f} streams (95 % interval {low} to {high})."


def _busy(best: Measured) -> list[str]:
    if best.steps is None or best.steps.draft_ms == 0:
        return []
    return [
        f"There the draft computes {best.steps.draft_busy:.0%} of the time and the target {best.steps.target_busy:.0%}."
    ]


def _price(analysis: Analysis, best: Measured, prices: Mapping[str, float], *, has_draft_device: bool) -> list[str]:
    if "target" not in prices:
        return []
    plain = analysis.measured[best.cell._replace(gamma=0)]
    own = device_costs(best, prices, has_draft_device=has_draft_device)["cost_per_million_tokens"]
    alone = device_costs(plain, prices, has_draft_device=has_draft_device)["cost_per_million_tokens"]
    charged = "both devices charged" if has_draft_device else "one device charged"
    return [f"A million tokens cost {own:.2f} there, {charged}; {alone:.2f} without speculation."]


def _streams(batch: int) -> str:
    return "1 stream" if batch == 1 else f"{batch} streams"


def _times(one: Measured) -> str:
    return f"{one.ratio:.2f} x ({one.ratio_ci.low:.2f} to {one.ratio_ci.high:.2f})"
