"""Number formats that the default model is tested in."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.config import EngineConfig
from outrider.engine.model import resolve_dtype

SERVED = str(resolve_dtype(EngineConfig(model=".", device="cpu"), torch.device("cpu"))).removeprefix("torch.")
"""What this processor serves in unless told otherwise."""
FORMATS = [
    pytest.param(
        "bfloat16", marks=pytest.mark.skipif(SERVED != "bfloat16", reason="bfloat16 is slow on this processor")
    ),
    "float32",
]
