"""Views of a report that both the plots and the page need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

Report = Mapping[str, Any]
Cell = Mapping[str, Any]


def contexts(report: Report) -> list[int]:
    return sorted({cell["context"] for cell in report["cells"]})


def gammas(report: Report) -> list[int | str]:
    """Fixed ones ascending, then auto."""
    found = {cell["gamma"] for cell in report["cells"]}
    return sorted(found, key=lambda gamma: (gamma == "auto", 0 if gamma == "auto" else gamma))


def curve(report: Report, context: int, gamma: int | str) -> list[Cell]:
    """Cells of one gamma at one context, by batch."""
    found = [cell for cell in report["cells"] if (cell["context"], cell["gamma"]) == (context, gamma)]
    return sorted(found, key=lambda cell: int(cell["batch"]))


def acceptance_by_gamma(report: Report) -> dict[int | str, list[float]]:
    """Acceptance by position given that the slot was looked at, all cells of a fixed gamma together.

    Slots are looked at by rounds that accepted all slots before them; each cell weighs as many rounds as it drafted.
    `auto` is left out: its rounds differ in length, and a slot that was never drafted is not a rejected one.
    """
    found: dict[int | str, list[float]] = {}
    for gamma in gammas(report):
        reached: dict[int, float] = defaultdict(float)
        for cell in report["cells"]:
            if cell["gamma"] != gamma or gamma in (0, "auto"):
                continue
            rounds = cell.get("spec_decode_num_drafts") or 0
            for position, rate in enumerate(cell.get("spec_decode_per_position_acceptance_rates") or (), 1):
                reached[position] += rate * rounds
            reached[0] += rounds
        positions = [reached[index] for index in range(len(reached))]
        rates = [later / earlier for earlier, later in pairwise(positions) if earlier > 0]
        if rates:
            found[gamma] = rates
    return found


def tasks(report: Report) -> dict[str, dict[str, float]]:
    """Acceptance by task, all cells that draft together: accepted over drafted, and tokens per round."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for cell in report["cells"]:
        if cell["gamma"] == 0:
            continue
        for task, own in cell["acceptance_by_task"].items():
            counts[task][0] += own["spec_decode_num_drafts"]
            counts[task][1] += own["spec_decode_num_draft_tokens"]
            counts[task][2] += own["spec_decode_num_accepted_tokens"]
    return {
        task: {"rate": accepted / drafted, "length": 1 + accepted / rounds, "rounds": rounds}
        for task, (rounds, drafted, accepted) in sorted(counts.items())
        if rounds and drafted
    }


def round_parts(report: Report) -> list[tuple[str, dict[str, float]]]:
    """Milliseconds of a round by part, for the cells of the first context that have them."""
    if not report["cells"]:
        return []
    first = contexts(report)[0]
    return [
        (f"{cell['batch']} x {'plain' if cell['gamma'] == 0 else cell['gamma']}", cell["steps"]["parts_ms"])
        for cell in report["cells"]
        if cell["context"] == first and cell["steps"]
    ]
