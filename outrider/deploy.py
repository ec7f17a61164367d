"""`outrider deploy`: a process of its own, because it knows all three parts and this command line knows none."""

from __future__ import annotations

import os
import sys

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""All options go through unread, `--help` too."""


def deploy(context: typer.Context) -> None:
    """Serve a pair on a Ray cluster, say how it is, or remove it."""
    os.execv(sys.executable, [sys.executable, "-m", "cluster", *context.args])
