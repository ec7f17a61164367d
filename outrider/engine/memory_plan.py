"""The memory plan at start: what the weights took, what a full step needs, and what is left for keys and values."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import psutil
import torch

from outrider.engine.batch import round_up
from outrider.engine.config import EngineConfig
from outrider.errors import DoesNotFit

log = logging.getLogger(__name__)

CPU_KV_TOKENS = 65_536
CPU_KV_SHARE = 0.4
"""On the CPU the pool is bounded by these two, the share being of the memory available after loading, unless
`kv_cache_tokens` says otherwise: other programs need memory too, and nobody says how much."""

_GIB = 2**30
_DRAWN_AT_ONCE = 1 << 26
"""Logits that are processed and drawn from at once; p and the residual take as much again each."""
_PADDING = 128
"""Rows are padded to a multiple of so many at most."""
_GRAPHS = 1 << 28
"""What the driver keeps for some forty graphs of a few hundred kernels each, by a cautious guess."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """What a full step needs besides weights and KV, in bytes.

    Attributes:
        activations: hidden states and masks of all its rows.
        logits: rows of logits as the model gives them, in float32, and what drawing from them takes.
        graphs: what captured steps hold, on devices that capture.
    """

    activations: int
    logits: int
    graphs: int = 0

    @classmethod
    def of(
        cls, config: EngineConfig, *, vocab_rows: int, widest: int, itemsize: int, copies: int, captures: bool = False
    ) -> Workspace:
        """Of a model.

        Args:
            config: limits of a step.
            vocab_rows: numbers in a row of logits.
            widest: numbers in a row of the widest layer.
            itemsize: bytes of each.
            copies: rows of that width that live at the same time.
            captures: whether steps are captured.
        """
        rows = min(
            config.max_num_seqs if config.logits_rows is None else config.logits_rows, config.max_num_batched_tokens
        )
        logits = rows * vocab_rows
        drawing = 3 * 4 * min(logits, _DRAWN_AT_ONCE)
        captured = round_up(config.graph_rows, _PADDING)
        held = captured * (copies * widest + 2 * vocab_rows) * itemsize + _GRAPHS
        return cls(
            copies * config.max_num_batched_tokens * widest * itemsize,
            logits * (itemsize + 4) + drawing,
            held if captures else 0,
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where a device's memory goes, in bytes.

    Attributes:
        total: of the device or devices.
        usable: share of it that this service may fill, what others hold not counted.
        taken: what is taken already, weights included.
        weights: of the model.
        workspace: of a full step.
        is_cuda: whether `usable` is a hard limit, as on a GPU.
    """

    total: int
    usable: int
    taken: int
    weights: int
    workspace: Workspace
    is_cuda: bool

    @property
    def left(self) -> int:
        """For KV; negative where there is too little for the rest already."""
        return self.usable - self.taken - self.workspace.activations - self.workspace.logits - self.workspace.graphs

    def tokens(self, bytes_per_token: int) -> int:
        """KV positions that the plan gives where nobody says how many."""
        if self.is_cuda:
            return max(self.left, 0) // bytes_per_token
        share = int((self.usable - self.taken) * CPU_KV_SHARE)
        return min(max(min(self.left, share), 0) // bytes_per_token, CPU_KV_TOKENS)

    def __str__(self) -> str:
        parts = (
            (self.total, "in all"),
            (self.usable, "usable"),
            (self.weights, "weights"),
            (max(self.taken - self.weights, 0) if self.is_cuda else 0, "taken otherwise"),
            (self.workspace.activations, "activations"),
            (self.workspace.logits, "logits"),
            (self.workspace.graphs, "CUDA graphs"),
            (self.left, "left for KV"),
        )
        return ", ".join(f"{size / _GIB:.2f} GiB {name}" for size, name in parts if size or name == "left for KV")


def plan_blocks(plan: MemoryPlan, config: EngineConfig, *, block_size: int, bytes_per_token: int, longest: int) -> int:
    """How many KV blocks there will be.

    Args:
        plan: of the device, weights loaded.
        config: the engine's configuration.
        block_size: tokens per block.
        bytes_per_token: K and V of one position over all layers.
        longest: tokens of the longest stream that must fit.

    Raises:
        DoesNotFit: the longest stream, or the pool that was asked for, does not fit; the message holds the numbers.
    """
    tokens = plan.tokens(bytes_per_token) if config.kv_cache_tokens is None else config.kv_cache_tokens
    remedies = "lower max_num_seqs, max_num_batched_tokens or max_slots"
    if config.kv_cache_tokens is not None and tokens * bytes_per_token > plan.left:
        raise DoesNotFit(
            f"kv_cache_tokens = {tokens:,} at {bytes_per_token:,} bytes each is {tokens * bytes_per_token / _GIB:.2f} "
            f"GiB, which does not fit ({plan}): lower it, or {remedies}"
        )
    blocks = tokens // block_size
    needed = longest if config.max_model_len is not None else block_size
    if blocks * block_size < needed:
        more = "raise kv_cache_tokens" if config.kv_cache_tokens is not None else remedies
        more += ", or raise gpu_memory_utilization" if plan.is_cuda else ""
        raise DoesNotFit(
            f"KV for {needed:,} tokens at {bytes_per_token:,} bytes each is needed, {blocks * block_size:,} tokens fit "
            f"({plan}): lower max_model_len, or {more}"
        )
    log.info("memory: %s; KV pool of %d blocks of %d tokens", plan, blocks, block_size)
    return blocks


def measure(config: EngineConfig, weights: int, workspace: Workspace) -> MemoryPlan:
    """The plan of this machine as it is now.

    Args:
        config: the engine's configuration.
        weights: bytes of the model that is loaded.
        workspace: of a full step.
    """
    if not config.on_cuda:
        # Weights are loaded and counted out of what is available; a file that is only mapped is not, and need not be.
        memory = psutil.virtual_memory()
        return MemoryPlan(memory.total, memory.available, 0, weights, workspace, is_cuda=False)
    total = usable = taken = 0
    for device in _devices(config.device):
        free, size = torch.cuda.mem_get_info(device)
        total += size
        usable += int(size * config.gpu_memory_utilization)
        taken += size - free
    return MemoryPlan(total, usable, taken, weights, workspace, is_cuda=True)


def _devices(name: str) -> range:
    if name == "auto":
        return range(torch.cuda.device_count())
    index = torch.device(name).index or 0
    return range(index, index + 1)
