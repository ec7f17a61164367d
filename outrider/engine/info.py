"""What a loaded model says about itself."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

# Weights up to this size are hashed whole; beyond it, this many evenly spaced slices of each file and its header.
FULL_HASH_BYTES = 1 << 30
HASH_SLICES = 64
HASH_SLICE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model.

    Attributes:
        model_id: Name of the model.
        revision: Its revision, or `local`.
        architecture: Class name, as in config.json.
        vocab_rows: Rows of the output head, which may exceed the tokenizer's vocabulary.
        parameters: Number of distinct weights.
        dtype: Of weights and KV, e.g. `bfloat16`.
        device: e.g. `cpu`, `cuda:0`.
        device_name: Human name of the device.
        device_uuid: Identity of the device, equal for processes that share it.
        max_positions: Longest stream in tokens.
        num_layers: Layers with KV.
        kv_bytes_per_token: K and V of one position over all layers.
        eos_token_ids: Ids that end a text.
        weight_hash: Digest of the weight files.
        attention_backend: `gather`, `varlen`, or `varlen+graphs` where small steps are replayed from CUDA graphs;
            `+compiled` where the pass is.
        invariant: Whether a position's logits were found to depend on its own prefix only, bit for bit.
        invariance_note: What the start-up test covered, or the first difference it found.
        block_size: Tokens per KV block.
        hidden_size: Width of the hidden states that a draft can build on; 0 where there are none.
    """

    model_id: str
    revision: str
    architecture: str
    vocab_rows: int
    parameters: int
    dtype: str
    device: str
    device_name: str
    device_uuid: str
    max_positions: int
    num_layers: int
    kv_bytes_per_token: int
    eos_token_ids: tuple[int, ...]
    weight_hash: str
    attention_backend: str
    invariant: bool
    invariance_note: str
    block_size: int
    hidden_size: int = 0


def weight_hash(folder: Path) -> str:
    """Hex SHA-256 over a folder's safetensors files, or the pickled tensors of a head that has none.

    Sampled beyond `FULL_HASH_BYTES` in total: name, size, header and `HASH_SLICES` slices of each file, enough to tell
    one training run from another without reading 100 GB.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model.bin"))
    whole = sum(file.stat().st_size for file in files) <= FULL_HASH_BYTES
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            if whole:
                for chunk in iter(lambda: stream.read(1 << 20), b""):
                    digest.update(chunk)
                continue
            prefix = stream.read(8)
            digest.update(prefix + stream.read(int.from_bytes(prefix, "little")))
            for index in range(HASH_SLICES):
                stream.seek(index * max(0, size - HASH_SLICE_BYTES) // (HASH_SLICES - 1))
                digest.update(stream.read(HASH_SLICE_BYTES))
    return digest.hexdigest()


def dummy_hash(folder: Path) -> str:
    """Names the shape where there are no weights: draft and target of one shape are not thereby the same model."""
    return "dummy:" + hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:58]


def name_and_revision(folder: Path) -> tuple[str, str]:
    """Model id and revision of a folder; a hub cache's `models--org--name/snapshots/<commit>` names both."""
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1].name.removeprefix("models--").replace("--", "/"), folder.name
    return folder.name, "local"


def eos_ids(folder: Path, config_value: int | list[int] | None) -> tuple[int, ...]:
    """Ids that end a text: those of generation_config.json, which chat models extend, and the model's own."""
    found: set[int] = set()
    values = [config_value]
    generation = folder / "generation_config.json"
    if generation.is_file():
        values.append(json.loads(generation.read_text()).get("eos_token_id"))
    for value in values:
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return tuple(sorted(found))


def device_names(device: torch.device) -> tuple[str, str]:
    """Human name and identity of a device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.name, str(properties.uuid)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip(), "cpu"
    return platform.processor() or platform.machine(), "cpu"
