"""Has a service's model measured while it is idle."""

from __future__ import annotations

import torch

from outrider.engine.block_manager import BlockManager
from outrider.engine.model import Model
from outrider.engine.profile import Profiler
from outrider.engine.profile_shapes import Bounds
from outrider.fetch.cache import cache_root
from outrider.service.config import ServiceConfig


def profiler(config: ServiceConfig, model: Model, blocks: BlockManager) -> Profiler:
    """A profiler for the engine thread, in which this is called: it knows the thread's number of torch threads."""
    return Profiler(
        model,
        blocks,
        Bounds(config.max_num_seqs, config.max_num_batched_tokens, config.max_slots),
        seconds=config.profile_seconds,
        folder=cache_root() / "costs",
        threads=torch.get_num_threads(),
    )
