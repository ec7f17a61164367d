"""Loading an EAGLE-3 head for serving: its checkpoint, and from the target's folder what a head does not bring."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.engine.config import EngineConfig
from outrider.engine.eagle3 import Eagle3Head
from outrider.engine.eagle3_checkpoint import is_eagle3, load
from outrider.engine.eagle3_model import Eagle3Model
from outrider.engine.embeddings import load_embeddings
from outrider.engine.feature_store import FeatureStore
from outrider.engine.info import ModelInfo, device_names, name_and_revision, weight_hash
from outrider.engine.model import resolve_device, resolve_dtype, set_threads
from outrider.engine.packing import pack_linears
from outrider.errors import ModelRefused, ModelUnavailable
from outrider.features import FeatureRequest

log = logging.getLogger(__name__)

DEFAULT_WINDOW = 64
_LONGEST_STREAM = 1 << 17


class HeadLimits(NamedTuple):
    """What bounds a head's memory.

    Attributes:
        window: positions with features that it looks back; None takes the head's own, or `DEFAULT_WINDOW`.
        seats: streams with keys and values at the same time.
        slots: drafted tokens per round.
    """

    window: int | None
    seats: int
    slots: int


def is_head(folder: Path) -> bool:
    """Whether a folder holds an EAGLE-3 head."""
    try:
        return is_eagle3(_config(folder))
    except ModelUnavailable:
        return False


def target_of(folder: Path) -> str | None:
    """The target that a head's files name; None where they name none."""
    raw = _config(folder)
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    return raw.get("target_model") or verifier.get("name_or_path") or None


def brings_embeddings(folder: Path) -> bool:
    """Whether a head's files hold the target's embeddings too."""
    try:
        load_embeddings(folder)
    except ModelUnavailable:
        return False
    return True


def load_head(config: EngineConfig, *, target: Path | None, limits: HeadLimits) -> Eagle3Model:
    """Loads a head; must run in the thread that will call `forward`.

    Args:
        config: of the head.
        target: folder of the target, for its embeddings and its number of layers; None if the head brings both.
        limits: of its memory.

    Raises:
        ModelUnavailable: the head or the embeddings cannot be read.
        ModelRefused: they are not those of a supported head and its target.
    """
    started = time.monotonic()
    folder = Path(config.model)
    device = resolve_device(config)
    dtype = resolve_dtype(config, device)
    set_threads(config, dtype)
    target_config = _text(_config(target)) if target else {}
    head = load(folder, target_layers=target_config.get("num_hidden_layers"), dtype=dtype).to(device)
    _sort_ids(head)
    embeddings = _embeddings(folder, target, head)
    pack_linears(head)
    shape = head.config
    request = FeatureRequest(shape.feature_layers, limits.window or shape.window or DEFAULT_WINDOW)
    own = _config(folder)
    longest = config.max_model_len or target_config.get("max_position_embeddings") or own.get("max_position_embeddings")
    info = _info(config, head, device, dtype, longest or _LONGEST_STREAM)
    model = Eagle3Model(
        head,
        embeddings if device.type == "cpu" else embeddings.to(device),
        info,
        FeatureStore(request.row_bytes(shape.target_hidden), request.window),
        request=request,
        trained_for=target_of(folder) or "",
        seats=limits.seats,
        slots=limits.slots,
    )
    log.info(
        "loaded %s (EAGLE-3, %.1f M parameters, %s, %d of %d ids, layers %s, window %d) in %.1f s",
        info.model_id,
        info.parameters / 1e6,
        info.dtype,
        shape.draft_vocab,
        shape.vocab,
        ", ".join(map(str, request.layers)),
        request.window,
        time.monotonic() - started,
    )
    return model


def _config(folder: Path) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{folder} is not a readable model folder: {error}") from error
    return raw


def _text(raw: dict[str, Any]) -> dict[str, Any]:
    """The part of a `config.json` that describes the language model."""
    return raw.get("text_config") or raw


def _sort_ids(head: Eagle3Head) -> None:
    """Puts the head's ids in rising order, in which supports of q travel."""
    order = head.target_ids.argsort()
    head.target_ids = head.target_ids[order]
    head.lm_head.weight = torch.nn.Parameter(head.lm_head.weight[order], requires_grad=False)


def _embeddings(folder: Path, target: Path | None, head: Eagle3Head) -> Tensor:
    """
    Raises:
        ModelUnavailable: neither folder holds embeddings.
        ModelRefused: they do not fit the head.
    """
    try:
        table = load_embeddings(target or folder)
    except ModelUnavailable as error:
        if target is not None:
            raise
        raise ModelUnavailable(
            f"{folder} holds no embeddings and does not name its target: give the target's folder with --embeddings"
        ) from error
    shape = head.config
    if table.shape[1] != shape.hidden or table.shape[0] < shape.vocab:
        raise ModelRefused(
            f"the embeddings in {target or folder} are {table.shape[0]} x {table.shape[1]}; "
            f"the head in {folder} is made for {shape.vocab} x {shape.hidden}"
        )
    return table


def _info(config: EngineConfig, head: Eagle3Head, device: torch.device, dtype: torch.dtype, longest: int) -> ModelInfo:
    folder, shape = Path(config.model), head.config
    model_id, revision = name_and_revision(folder.resolve())
    name, uuid = device_names(device)
    return ModelInfo(
        model_id=config.model_id or model_id,
        revision=config.revision or revision,
        architecture="Eagle3",
        vocab_rows=shape.vocab,
        parameters=shape.parameters,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        device_name=name,
        device_uuid=uuid,
        max_positions=longest,
        num_layers=1,
        kv_bytes_per_token=2 * shape.kv_heads * shape.head_dim * dtype.itemsize,
        eos_token_ids=(),
        weight_hash=weight_hash(folder),
        attention_backend="ring",
        invariant=False,
        invariance_note="not tested: what a draft rounds does not show in the text",
        block_size=longest,
        hidden_size=shape.target_hidden,
    )
