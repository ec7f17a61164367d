"""Asks the parts what a configuration file means to them: each knows its own settings, and nobody else does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outrider.configuration.document import Setting
from outrider.configuration.settings import PRINT_FLAG
from outrider.errors import Unavailable

MODULES: Mapping[str, str] = {
    "target": "target_service",
    "draft": "draft_service",
    "coordinator": "coordinator",
}


class Answer(NamedTuple):
    """What a part says: its effective settings by key, and what is wrong with them."""

    settings: Mapping[str, Setting]
    faults: Sequence[str]


def ask(part: str, arguments: Sequence[str]) -> Answer:
    """
    Args:
        arguments: as for the part itself, for example `--config FILE`.

    Raises:
        Unavailable: the part cannot be started, or does not know a flag; says what it said.
    """
    command = [sys.executable, "-m", MODULES[part], *arguments, PRINT_FLAG]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        said = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise Unavailable(f"{part}: {lines[-1]}") from None
    return Answer(
        {key: Setting(entry["value"], entry["origin"]) for key, entry in said["settings"].items()}, said["faults"]
    )
