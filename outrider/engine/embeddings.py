"""A target's input embeddings and output head alone, mapped from its files: what a head shares with its target."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import ModelUnavailable

_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
_OUTPUT_NAMES = ("lm_head.weight", "embed_out.weight", "output.weight")
_INDEX = "model.safetensors.index.json"


def load_embeddings(folder: Path) -> Tensor:
    """[vocab, hidden] in the type they are stored in; pages of the file are read when ids are looked up.

    Raises:
        ModelUnavailable: the folder holds no safetensors with input embeddings.
    """
    if (found := _find(folder, _NAMES)) is None:
        raise ModelUnavailable(f"{folder} holds no safetensors with input embeddings ({', '.join(_NAMES)})")
    return found


def load_output(folder: Path) -> Tensor:
    """[vocab, hidden] weights of the output head, which are the embeddings' where the files hold none.

    Raises:
        ModelUnavailable: the folder holds neither.
    """
    found = _find(folder, _OUTPUT_NAMES)
    return load_embeddings(folder) if found is None else found


def _find(folder: Path, names: tuple[str, ...]) -> Tensor | None:
    """The first tensor of one of these names outside the decoder layers; None if there is none.

    Raises:
        ModelUnavailable: a file cannot be read.
    """
    try:
        for file in _files(folder, names):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (the handle is no mapping)
                    if _is_one(name, names):
                        found: Tensor = tensors.get_tensor(name)
                        return found
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelUnavailable(f"the weights in {folder} cannot be read: {error}") from error
    return None


def _is_one(name: str, names: tuple[str, ...]) -> bool:
    # The layers of some checkpoints (MTP) hold copies.
    return name.endswith(names) and ".layers." not in name


def _files(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """The folder's safetensors; those that hold a tensor of these names if an index tells."""
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return [folder / shard for name, shard in shards.items() if _is_one(name, names)]
