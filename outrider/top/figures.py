"""What two looks at a coordinator say about the time between them.

Acceptance at position i = accepted there / rounds with a draft; mean acceptance length = 1 + accepted / those rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.top.sample import Sample

SIDES = ("target", "draft")


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures that the time between the looks says nothing about are None.

    Attributes:
        running, waiting: answers now.
        tokens_per_s: generated.
        gamma: drafted tokens asked for per round, plain tokens counted as 0.
        acceptance: share of the drafted tokens that were accepted.
        acceptance_per_position: of rounds with a draft; positions behind the last accepted one are left out.
        mean_acceptance_length: tokens per round with a draft.
        step_ms: mean time of a step by side and stage.
        kv_use: share of the KV cache in use now, by side.
        skipped_per_s: rounds decoded plainly, by reason; reasons that did not occur are left out.
        degraded: one line per part that is not doing its work.
    """

    running: int
    waiting: int
    tokens_per_s: float
    gamma: float | None
    acceptance: float | None
    acceptance_per_position: tuple[float, ...]
    mean_acceptance_length: float | None
    step_ms: Mapping[str, Mapping[str, float | None]]
    kv_use: Mapping[str, float]
    skipped_per_s: Mapping[str, float]
    degraded: tuple[str, ...]


def figures(before: Sample, now: Sample) -> Figures:
    """Compares two looks at the same coordinator, the older one first."""
    seconds = max(now.at_s - before.at_s, 1e-9)

    def grown(name: str, **labels: str) -> float:
        """By how much a counter grew; one that fell began anew with the process."""
        value = now.value(name, **labels)
        old = before.value(name, **labels)
        return value - old if value >= old else value

    drafts = grown("spec_decode_num_drafts_total")
    accepted = grown("spec_decode_num_accepted_tokens_total")
    per_position = [
        grown("spec_decode_num_accepted_tokens_per_pos_total", position=position)
        for position in sorted(now.labels("spec_decode_num_accepted_tokens_per_pos_total", "position"), key=int)
    ]
    while per_position and not per_position[-1]:
        per_position.pop()
    reasons = now.labels("draft_skipped_total", "reason")
    skipped = {reason: grown("draft_skipped_total", reason=reason) / seconds for reason in reasons}
    return Figures(
        running=int(now.value("num_requests_running")),
        waiting=int(now.value("num_requests_waiting")),
        tokens_per_s=grown("generation_tokens_total") / seconds,
        gamma=_ratio(grown("gamma_sum"), grown("gamma_count")),
        acceptance=_ratio(accepted, grown("spec_decode_num_draft_tokens_total")),
        acceptance_per_position=tuple(count / drafts for count in per_position) if drafts else (),
        mean_acceptance_length=1 + accepted / drafts if drafts else None,
        step_ms={
            side: {
                stage: _ratio(
                    1_000 * grown("step_seconds_sum", side=side, stage=stage),
                    grown("step_seconds_count", side=side, stage=stage),
                )
                for stage in ("queue", "forward", "sample", "total")
            }
            for side in SIDES
        },
        kv_use={side: now.value("kv_cache_usage_perc", side=side) for side in SIDES},
        skipped_per_s={reason: rate for reason, rate in skipped.items() if rate},
        degraded=_degraded(now),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _degraded(now: Sample) -> tuple[str, ...]:
    lines = [
        f"{entry.get('part')}: {entry.get('reason')} (for {float(entry.get('since_s') or 0):.0f} s)"
        for entry in now.ready.get("degraded", ())
    ]
    error = now.ready.get("error")
    if not now.is_ready and isinstance(error, dict):
        lines.insert(0, f"not ready: {error.get('message')}")
    return tuple(lines)
