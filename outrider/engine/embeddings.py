"""A target's input embeddings alone, mapped from its files: what a head needs that does not bring its own."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import ModelUnavailable

_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
_INDEX = "model.safetensors.index.json"


def load_embeddings(folder: Path) -> Tensor:
    """[vocab, hidden] in the type they are stored in; pages of the file are read when ids are looked up.

    Raises:
        ModelUnavailable: the folder holds no safetensors with input embeddings.
    """
    try:
        for file in _files(folder):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (the handle is no mapping)
                    if name.endswith(_NAMES):
                        found: Tensor = tensors.get_tensor(name)
                        return found
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelUnavailable(f"the embeddings in {folder} cannot be read: {error}") from error
    raise ModelUnavailable(f"{folder} holds no safetensors with input embeddings ({', '.join(_NAMES)})")


def _files(folder: Path) -> list[Path]:
    """The folder's safetensors, those that hold embeddings first if an index tells."""
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return [folder / shard for name, shard in shards.items() if name.endswith(_NAMES)]
