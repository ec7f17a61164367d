"""The names under which the parts' certificates are checked, wherever the parts run."""

from __future__ import annotations

from typing import Literal

Part = Literal["draft", "target", "coordinator", "probe"]

PARTS: tuple[Part, ...] = ("draft", "target", "coordinator", "probe")
"""Who gets a certificate; `probe` is for health checks, and may ask a service how it is, but open no link to it."""


def authority(part: str) -> str:
    """The name in a part's certificate; addresses come and go (containers, pods), this one stays."""
    return f"outrider-{part}"
