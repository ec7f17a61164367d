"""Cost profiles on disk, each under a name for everything that it depends on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import torch

from outrider.costs import CostProfile
from outrider.engine.info import ModelInfo

log = logging.getLogger(__name__)

FORMAT = 1
"""Of the files; grows with every change of what is measured or how."""


def profile_key(info: ModelInfo, threads: int) -> str:
    """Names all that a profile depends on: weights, number format, device, torch, attention path, threads."""
    parts = (
        FORMAT,
        info.weight_hash,
        info.dtype,
        info.device,
        info.device_name,
        torch.__version__,
        info.attention_backend,
        info.block_size,
        threads,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def load_profile(folder: Path, key: str) -> CostProfile | None:
    """The profile kept under a key, or None; an unreadable file counts as none."""
    try:
        return CostProfile.from_json(json.loads((folder / f"{key}.json").read_text("utf-8")), source="cache")
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        log.warning("the cost profile %s cannot be read and is measured anew: %s", key, error)
        return None


def store_profile(folder: Path, key: str, profile: CostProfile) -> None:
    """Keeps a profile; a folder that cannot be written costs the next start its measurement, nothing else."""
    path = folder / f"{key}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps(profile.to_json()), "utf-8")
        scratch.replace(path)
    except OSError as error:
        log.warning("the cost profile cannot be kept: %s", error)
