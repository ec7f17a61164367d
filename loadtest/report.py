"""`report.json`: everything a sweep found, for programs and for the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.analysis import Analysis, Measured, device_costs
from loadtest.verdict import verdict

FORMAT = 1


def build(
    analysis: Analysis,
    *,
    workload: Mapping[str, Any],
    services: Mapping[str, Any],
    environment: Mapping[str, Any],
    prices: Mapping[str, float],
    has_draft_device: bool,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The report as JSON values. Times in the keys' units; what was not measured is null or listed."""
    contexts = analysis.contexts
    crossovers = {
        str(context): {str(gamma): found.as_json() for gamma, found in by_gamma.items()}
        for context, by_gamma in analysis.crossovers.items()
    }
    cells = [_cell(one, prices, has_draft_device=has_draft_device) for _, one in _ordered(analysis)]
    return {
        "format": FORMAT,
        "verdict": verdict(analysis, prices, has_draft_device=has_draft_device),
        "cells": cells,
        "crossover": crossovers.get(str(contexts[0]), {}) if contexts else {},
        "crossover_by_context": crossovers,
        "schedule": [list(entry) for entry in analysis.schedule],
        "not_measured": [
            {"batch": cell.batch, "gamma": cell.gamma, "context": cell.context, "reason": reason}
            for cell, reason in analysis.refused.items()
        ],
        "workload": dict(workload),
        "services": dict(services),
        "prices_per_hour": dict(prices),
        "environment": dict(environment),
        "notes": list(notes),
    }


def schedule(report: Mapping[str, Any]) -> dict[str, Any]:
    """`schedule.json`: what `outrider up --schedule` reads, and where it comes from."""
    cells = report["cells"]
    return {
        "num_speculative_tokens_per_batch_size": report["schedule"],
        "measured": {
            "target": report["services"].get("target"),
            "draft": report["services"].get("draft"),
            "batches": sorted({cell["batch"] for cell in cells}),
            "gammas": sorted({cell["gamma"] for cell in cells if cell["gamma"] != "auto"}),
            "context": min((cell["context"] for cell in cells), default=0),
            "dataset": report["workload"].get("dataset"),
            "date": report["environment"].get("date"),
            "machine": report["environment"].get("machine"),
            "gpus": report["environment"].get("gpus"),
        },
    }


def write(folder: Path, report: Mapping[str, Any]) -> None:
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("report.json", report), ("schedule.json", schedule(report))):
        (folder / name).write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", "utf-8")


def _ordered(analysis: Analysis) -> list[tuple[Any, Measured]]:
    def key(item: tuple[Any, Measured]) -> tuple[int, int, bool, int]:
        batch, gamma, context = item[0]
        return context, batch, gamma == "auto", 0 if gamma == "auto" else gamma

    return sorted(analysis.measured.items(), key=key)


def _cell(one: Measured, prices: Mapping[str, float], *, has_draft_device: bool) -> dict[str, Any]:
    return {
        "batch": one.cell.batch,
        "gamma": one.cell.gamma,
        "context": one.cell.context,
        "ratio_to_plain": round(one.ratio, 4),
        "ratio_ci": [round(end, 4) for end in one.ratio_ci],
        **one.figures,
        "acceptance_given_tested": [round(rate, 4) for rate in one.acceptance],
        "acceptance_by_task": one.by_task,
        "predicted_output_throughput": None if one.predicted is None else round(one.predicted, 4),
        "measured_to_predicted": None if one.predicted is None else round(one.throughput / one.predicted, 4),
        "steps": None if one.steps is None else one.steps.as_json(),
        **device_costs(one, prices, has_draft_device=has_draft_device),
    }
