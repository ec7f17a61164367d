"""Whether a model's steps are captured in CUDA graphs, and the capture at its start."""

from __future__ import annotations

import logging

import torch

from outrider import phases
from outrider.engine.causal_lm import PagedCausalLM
from outrider.engine.config import VARLEN_PAGE, EngineConfig
from outrider.engine.graphs import Graphs
from outrider.engine.hidden_states import HiddenStates
from outrider.engine.recorder import CudaRecorder

log = logging.getLogger(__name__)


def why_eager(config: EngineConfig, network: PagedCausalLM) -> str | None:
    """Why no steps of this model are captured, or None."""
    return "--enforce-eager" if config.enforce_eager else obstacle(network)


def obstacle(network: PagedCausalLM) -> str | None:
    """Why this model's steps cannot be captured, or None."""
    if network.device.type != "cuda":
        return f"device {network.device.type}"
    if network.backend != "varlen":
        return f"attention by the {network.backend} path"
    if network.block_size % VARLEN_PAGE:
        return f"pages of {network.block_size} tokens"
    if len({shape.device for shape in network.shapes.values()}) > 1:
        return "layers on several devices"
    return None


def capture(
    network: PagedCausalLM, states: HiddenStates, config: EngineConfig, *, longest: int, room: int
) -> Graphs | None:
    """Captures a model's steps over the KV that it has now, or says in the log why none are replayed.

    Args:
        network: with its KV allocated.
        states: its hidden states.
        config: how it was loaded.
        longest: tokens of a stream.
        room: bytes that the memory plan left to graphs.
    """
    reason = why_eager(config, network)
    if reason is not None:
        if config.on_cuda or config.max_cudagraph_capture_size is not None:
            log.info("steps are not replayed from CUDA graphs: %s", reason)
        return None
    phases.announce("graphs", f"up to {config.graph_rows} rows")
    free = _free_bytes(network.device)
    graphs = Graphs(
        network,
        states,
        CudaRecorder(network.device),
        most_rows=network.rule.pad(config.graph_rows),
        most_streams=config.max_num_seqs,
        longest=longest,
    )
    if not graphs.capture():
        return None
    taken = free - _free_bytes(network.device)
    level = logging.WARNING if taken > room else logging.INFO
    log.log(level, "the graphs took %.2f GiB; the memory plan left them %.2f", taken / 2**30, room / 2**30)
    return graphs


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
