"""What an evaluation says, for programs and for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from loadtest.bootstrap import DRAWS, Interval, interval
from loadtest.evaluation.measure import Found
from loadtest.evaluation.prediction import best_gamma
from loadtest.evaluation.reading import Reading, rate


@dataclass(frozen=True, slots=True)
class DraftResult:
    """One draft; its first setting is the one that drafts are ranked by."""

    draft: str
    found: tuple[Found, ...]

    @property
    def best_measured(self) -> float:
        """Largest measured improvement under the first setting; plain decoding is one of the choices."""
        return max(improvements(self.found[0]).values(), default=1.0)

    def as_json(self) -> dict[str, Any]:
        """The first setting's figures on top, those of all settings in `settings`."""
        return {
            "draft": self.draft,
            **setting_json(self.found[0]),
            "settings": [setting_json(one) for one in self.found],
        }


def ranked(results: Sequence[DraftResult]) -> list[DraftResult]:
    """Best first, by measured improvement."""
    return sorted(results, key=lambda result: -result.best_measured)


def improvements(found: Found) -> dict[int, float]:
    """Measured tokens per second over plain decoding's, by gamma."""
    plain = rate(found.measured[0])
    return {gamma: rate(own) / plain for gamma, own in found.measured.items() if gamma and plain}


def improvement_interval(own: Sequence[Reading], plain: Sequence[Reading], seed: int = 0) -> Interval:
    """95 %, by drawing prompts anew; a draw takes a prompt's two answers together."""
    chosen = np.random.default_rng(seed).integers(len(own), size=(DRAWS, len(own)))
    tokens, seconds, plain_tokens, plain_seconds = (
        np.array([getattr(one, name) for one in arm], np.float64)[chosen].sum(axis=1)
        for arm in (own, plain)
        for name in ("tokens", "seconds")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return interval(np.nan_to_num(tokens / seconds / (plain_tokens / plain_seconds)))


def setting_json(found: Found) -> dict[str, Any]:
    """Of one setting."""
    measured = improvements(found)
    acceptance = found.acceptance()
    return {
        "temperature": found.setting.temperature,
        "rule": found.setting.rule,
        **acceptance.as_json(),
        "tasks": {task: found.acceptance(task).as_json() for task in found.tasks},
        "c": round(found.costs.c, 4),
        "target_ms": round(1e3 * float(found.costs.step(1)), 3),
        "link_ms": round(1e3 * found.costs.way_s, 3),
        "predicted": {str(gamma): round(value, 4) for gamma, value in found.predicted.items()},
        "measured": {str(gamma): round(value, 4) for gamma, value in measured.items()},
        "measured_intervals": {
            str(gamma): [round(end, 4) for end in improvement_interval(found.measured[gamma], found.measured[0])]
            for gamma in measured
        },
        "measured_over_predicted": {
            str(gamma): round(value / found.predicted[gamma], 4)
            for gamma, value in measured.items()
            if gamma in found.predicted
        },
        "best_gamma": best_gamma(found.predicted),
    }


def table(result: DraftResult) -> Table:
    """Settings down, what was found across."""
    made = Table("setting", "alpha", "by position", "c", "link", "improvement by gamma: predicted (measured)")
    made.title = f"draft {result.draft}"
    for found in result.found:
        own = setting_json(found)
        low, high = own["alpha_interval"]
        cells = []
        for gamma, value in own["predicted"].items():
            seen = own["measured"].get(gamma)
            text = f"{gamma}: {value:.2f}" + (f" ({seen:.2f})" if seen is not None else "")
            cells.append(f"[bold]{text}[/bold]" if int(gamma) == own["best_gamma"] else text)
        made.add_row(
            str(found.setting),
            f"{own['alpha']:.3f} ({low:.2f} to {high:.2f})",
            " ".join(f"{value:.2f}" for value in own["acceptance_per_position"]),
            f"{own['c']:.3f}",
            f"{own['link_ms']:.2f} ms",
            ", ".join(cells),
        )
        for task, values in own["tasks"].items():
            low, high = values["alpha_interval"]
            by_position = " ".join(f"{value:.2f}" for value in values["acceptance_per_position"])
            made.add_row(f"  {task}", f"{values['alpha']:.3f} ({low:.2f} to {high:.2f})", by_position, "", "", "")
    return made
