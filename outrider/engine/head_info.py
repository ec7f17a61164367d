"""What the loaders of heads have in common: the limits that are asked for, and the facts that are told."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from outrider.engine.config import EngineConfig
from outrider.engine.head import HeadShape
from outrider.engine.info import ModelInfo, device_names, name_and_revision, weight_hash

DEFAULT_WINDOW = 64
LONGEST_STREAM = 1 << 17
"""For heads whose files name no longest position."""


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


def head_info(
    config: EngineConfig,
    shape: HeadShape,
    *,
    architecture: str,
    vocab: int,
    parameters: int,
    target_hidden: int,
    longest: int,
    device: torch.device,
    dtype: torch.dtype,
) -> ModelInfo:
    """Facts about a loaded head.

    Args:
        config: of the engine; its model is the folder that the head was read from.
        shape: of its keys and values.
        architecture: for people.
        vocab: ids of the target.
        parameters: of the head, what it shares with the target not counted.
        target_hidden: width of the features' layers.
        longest: positions of a stream.
        device, dtype: of the head.
    """
    folder = Path(config.model)
    model_id, revision = name_and_revision(folder.resolve())
    name, uuid = device_names(device)
    return ModelInfo(
        model_id=config.model_id or model_id,
        revision=config.revision or revision,
        architecture=architecture,
        vocab_rows=vocab,
        parameters=parameters,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        device_name=name,
        device_uuid=uuid,
        max_positions=longest,
        num_layers=1,
        kv_bytes_per_token=shape.kv_heads * (shape.width + shape.value_width) * dtype.itemsize,
        eos_token_ids=(),
        weight_hash=weight_hash(folder),
        attention_backend="ring",
        invariant=False,
        invariance_note="not tested: what a draft rounds does not show in the text",
        block_size=longest,
        hidden_size=target_hidden,
    )
