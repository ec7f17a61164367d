"""Loading an EAGLE-3 head for serving: its checkpoint, and from the target's folder what a head does not bring."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.config import EngineConfig
from outrider.engine.eagle3 import Eagle3Head
from outrider.engine.eagle3_checkpoint import load
from outrider.engine.embeddings import load_embeddings
from outrider.engine.feature_store import FeatureStore
from outrider.engine.head_info import DEFAULT_WINDOW, LONGEST_STREAM, HeadLimits, head_info
from outrider.engine.head_model import HeadModel
from outrider.engine.model import resolve_device, resolve_dtype, set_threads
from outrider.engine.packing import pack_linears
from outrider.errors import ModelRefused, ModelUnavailable
from outrider.features import FeatureRequest

log = logging.getLogger(__name__)


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


def load_head(config: EngineConfig, *, target: Path | None, limits: HeadLimits) -> HeadModel:
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
    info = head_info(
        config,
        head.shape,
        architecture="Eagle3",
        vocab=shape.vocab,
        parameters=shape.parameters,
        target_hidden=shape.target_hidden,
        longest=longest or LONGEST_STREAM,
        device=device,
        dtype=dtype,
    )
    model = HeadModel(
        head,
        embeddings if device.type == "cpu" else embeddings.to(device),
        info,
        FeatureStore(request.row_bytes(shape.target_hidden), request.window),
        kind="eagle3",
        request=request,
        seats=limits.seats,
        slots=limits.slots,
        device=device,
        dtype=dtype,
        trained_for=target_of(folder) or "",
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
