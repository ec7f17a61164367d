"""What a model folder must hold before a service may load it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
"""Weights of many published EAGLE-3 heads, read by torch's loader of plain tensors; of no other model."""


def missing_files(folder: Path) -> list[str]:
    """Names of the files without which the weights in `folder` cannot be loaded; empty when it is complete.

    An interrupted download leaves a folder that looks like a model, so the shards are checked against their index.
    """
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if (folder / _INDEX).is_file():
        shards = set(read_json(folder / _INDEX).get("weight_map", {}).values())
        missing += sorted(shard for shard in shards if not (folder / shard).is_file())
    elif not weight_files(folder):
        missing.append("model.safetensors")
    return missing


def has_tokenizer(folder: Path) -> bool:
    """Whether any tokenizer file lies in `folder`, or none is needed: a draft head speaks its target's ids."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES) or is_head(read_json(folder / "config.json"))


def is_head(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json`, or the hub's extract of one, describes an EAGLE-3 head."""
    names = config.get("architectures") or ()
    return config.get("speculators_model_type") == "eagle3" or any("eagle3" in name.lower() for name in names)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that `transformers` would load from `folder`; of a head without any, its pickled ones."""
    if (folder / _INDEX).is_file():
        shards = set(read_json(folder / _INDEX).get("weight_map", {}).values())
        return sorted(folder / shard for shard in shards if (folder / shard).is_file())
    found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not found and (folder / PICKLED).is_file() and is_head(read_json(folder / "config.json")):
        return [folder / PICKLED]
    return found


def weight_bytes(folder: Path) -> int:
    """Size of the weights in `folder` on disk."""
    return sum(path.stat().st_size for path in weight_files(folder))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; an empty one when there is no such file."""
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def licence_of(folder: Path) -> str:
    """The licence that the model card in `folder` names in its front matter; "unknown" when there is none."""
    card = folder / "README.md"
    if not card.is_file():
        return "unknown"
    parts = card.read_text(encoding="utf-8", errors="replace").split("---", 2)
    front = parts[1] if len(parts) == 3 and not parts[0].strip() else ""
    found = dict(re.findall(r"^(license|license_name):[ \t]*(\S+)", front, flags=re.MULTILINE))
    return found.get("license_name") or found.get("license") or "unknown"
