"""Cards, driver, ports, open files and disk of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.doctor.finding import Finding, ok, problem, warning
from outrider.doctor.versions import numbers
from outrider.local.devices import Card
from outrider.local.layout import GIB

OLDEST_DRIVER = {12: 525, 13: 580}
"""Major version of CUDA -> the first Linux driver that runs it (NVIDIA: CUDA Compatibility, minor versions)."""

FEW_FILES, ENOUGH_FILES = 1024, 8192
"""Each client's connection takes a file; below the first number even the parts' own run short under load."""
SPARE_DISK_BYTES = 2 * GIB
"""For logs, converted weights and what else is written while serving."""


def check_cards(cards: Sequence[Card], *, has_driver_tool: bool) -> list[Finding]:
    """One finding per card; a card that hardly has free memory is somebody else's now."""
    if not cards and has_driver_tool:
        return [warning("cards", "nvidia-smi is there and lists no card", "run nvidia-smi: it says what is wrong")]
    if not cards:
        return [ok("cards", "no NVIDIA card: the parts run on the CPU")]
    found = []
    for card in cards:
        free, total = card.free_bytes / GIB, card.total_bytes / GIB
        text = f"{card.name}, driver {card.driver or 'unknown'}, {free:.1f} of {total:.1f} GiB free"
        if 2 * card.free_bytes < card.total_bytes:
            remedy = "nvidia-smi lists who uses it; plan with another card or stop them"
            found.append(warning(f"card {card.index}", text, remedy))
        else:
            found.append(ok(f"card {card.index}", text))
    return found


def check_cuda(cards: Sequence[Card], torch: str | None, cuda_runtime: str | None) -> Finding | None:
    """Whether torch is built for the cards and the driver runs it; None where there is nothing to compare.

    Args:
        torch: installed version of torch, such as "2.13.0" or "2.13.0+cpu".
        cuda_runtime: version of the CUDA runtime that came with it, or None.
    """
    if not cards or torch is None:
        return None
    label = torch.partition("+")[2]
    if label == "cpu":
        return problem("cuda", f"torch {torch} cannot use the cards", "install torch for CUDA (pytorch.org)")
    major = int(label[2:4]) if label[:2] == "cu" and label[2:4].isdigit() else (numbers(cuda_runtime or "") or (0,))[0]
    least = OLDEST_DRIVER.get(major)
    driver = min((numbers(card.driver) for card in cards), default=())
    if least is None or not driver:
        return warning(
            "cuda", f"torch {torch}: its CUDA version or the driver is not known", "check that they fit (nvidia-smi)"
        )
    if driver[0] < least:
        text = f"torch {torch} is built for CUDA {major}, which needs driver {least}; the driver is {cards[0].driver}"
        return problem("cuda", text, f"update the driver, or install a torch for CUDA {major - 1}")
    return ok("cuda", f"torch {torch} for CUDA {major}, driver {cards[0].driver}")


def check_ports(ports: Sequence[tuple[str, str, int]], taken: Callable[[str, int], str | None], stack: str) -> Finding:
    """Whether the ports (name, host, number; 0 is any) are free.

    Args:
        taken: why a port cannot be taken, or None.
        stack: address of this user's running stack, "" where none runs.
    """
    faults = [
        f"{name} {port} ({reason})" for name, host, port in ports if port and (reason := taken(host, port)) is not None
    ]
    if faults and stack:
        return warning("ports", f"a stack runs at {stack} and has {', '.join(faults)}", "outrider down stops it")
    if faults:
        return problem("ports", ", ".join(faults), "stop who listens there (ss -ltnp), or choose other ports")
    return ok("ports", ", ".join(f"{name} {port}" for name, _, port in ports) + " are free")


def check_files(soft: int, hard: int) -> Finding:
    """The limit on open files; negative numbers mean none."""
    text = "no limit on open files" if soft < 0 else f"up to {soft} open files"
    if soft < 0 or soft >= ENOUGH_FILES:
        return ok("files", text)
    remedy = f"ulimit -n {ENOUGH_FILES if hard < 0 else max(soft, min(hard, 65536))} before starting"
    return (problem if soft < FEW_FILES else warning)("files", f"{text}; each connection takes one", remedy)


def check_disk(cache: Path, existing: Path, free_bytes: int, needed_bytes: int) -> Finding:
    """Whether the cache can be written and has room for what is still to be downloaded."""
    text = f"{cache}: {free_bytes / GIB:.1f} GiB free, {needed_bytes / GIB:.1f} GiB to download"
    remedy = "make room, or set OUTRIDER_CACHE (and HF_HOME for models of the hub) to another disk"
    if not os.access(existing, os.W_OK | os.X_OK):
        return problem("disk", f"{existing} cannot be written", "set OUTRIDER_CACHE to a folder of your own")
    if free_bytes < needed_bytes:
        return problem("disk", text, remedy)
    if free_bytes < needed_bytes + SPARE_DISK_BYTES:
        return warning("disk", text, remedy)
    return ok("disk", text)
