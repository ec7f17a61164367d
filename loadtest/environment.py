"""The machine and the versions behind a measurement."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

import outrider
from outrider.local import devices

_PACKAGES = ("torch", "transformers", "ray", "grpcio", "numpy")


def describe() -> dict[str, Any]:
    """Of this process's machine, now. The load average says how quiet it was."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "outrider": outrider.__version__,
        "command": shlex.join(["outrider", *sys.argv[1:]]),
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} usable cores",
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "gpus": [card.name for card in devices.cards()],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
