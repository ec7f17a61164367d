"""Each model proves at start that ragged, paged passes compute what its plain forward computes.

First a small random replica of its architecture in float32, where any mistake stands out; then the weights themselves
in their own precision.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from outrider.engine.batch import Span
from outrider.engine.causal_lm import PagedCausalLM
from outrider.engine.support import architecture_of
from outrider.errors import ModelRefused

log = logging.getLogger(__name__)

REPLICA_VOCABULARY = 64
REPLICA_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
REPLICA_INNER_WIDTH = 64
# Shorter than the probe, so that the probe crosses it whatever the model's own window is.
REPLICA_WINDOW = 24
PROBE_TOKENS = (60, 41)
CHUNKS = (1, 7, 17, 2, 30, 5)
SEED = 20_230_202
SHAKE = 0.2
BUILD_ERRORS = (AttributeError, KeyError, RuntimeError, StrictDataclassError, TypeError, ValueError)

# Largest root mean square difference, relative to the logits' own spread.
REPLICA_TOLERANCE = 1e-4
WEIGHTS_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


def probe_architecture(config: PretrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Compares a replica's ragged passes with its plain forward.

    The replica keeps the architecture and its head geometry; depth, vocabulary, inner widths and the sliding window
    are cut down.

    Raises:
        ModelRefused: they differ; names the architecture.
    """
    try:
        network = replica_of(config, trust_remote_code=trust_remote_code)
    except BUILD_ERRORS as error:
        log.warning(
            "%s: no small replica could be built (%s); only the weights themselves are probed",
            architecture_of(config),
            error,
        )
        return
    probe_replica(network)


def replica_of(config: PretrainedConfig, *, trust_remote_code: bool = False) -> Any:
    """A small random model of this architecture in float32.

    Raises:
        BUILD_ERRORS: transformers cannot build it from the reduced configuration.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        network = AutoModelForCausalLM.from_config(
            replica_config(config), dtype=torch.float32, trust_remote_code=trust_remote_code
        )
        _shake_constants(network)
    return network.eval()


@torch.no_grad()
def _shake_constants(network: torch.nn.Module) -> None:
    """Moves parameters off a common initial value, which may switch off the very part that is computed wrongly."""
    for parameter in network.parameters():
        if parameter.numel() < 2 or not parameter.is_floating_point():
            continue
        if bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(torch.randn_like(parameter), alpha=SHAKE)


def probe_replica(network: Any) -> PagedCausalLM:
    """Compares a replica's ragged passes with its plain forward.

    Raises:
        ModelRefused: they differ; names the architecture.
    """
    architecture = architecture_of(network.config)
    try:
        paged = PagedCausalLM(network)
        difference = probe_error(paged)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ModelRefused(f"{architecture}: a ragged pass over paged KV fails: {error}") from error
    if not difference <= REPLICA_TOLERANCE:
        raise ModelRefused(
            f"{architecture}: ragged passes over paged KV differ from its plain forward (relative error "
            f"{difference:.1e}); its attention uses something that the engine does not compute"
        )
    log.info("%s: ragged passes agree with the plain forward (relative error %.1e)", architecture, difference)
    return paged


def probe_weights(paged: PagedCausalLM) -> None:
    """Compares the loaded model's ragged passes with its plain forward, in its own precision.

    Raises:
        ModelRefused: they differ by more than rounding.
    """
    difference = probe_error(paged, PROBE_TOKENS[1] // 2)
    tolerance = WEIGHTS_TOLERANCE[paged.dtype]
    if not difference <= tolerance:
        raise ModelRefused(
            f"{architecture_of(paged.network.config)}: with these weights, ragged passes over paged KV differ from the "
            f"plain forward (relative error {difference:.1e}, tolerance {tolerance:.0e})"
        )


def replica_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a small model of the same architecture."""
    small = copy.deepcopy(config)
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    text = small.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or [])
    depth = max([2, *(kinds.index(kind) + 1 for kind in set(kinds))])
    depth = min(depth, text.num_hidden_layers)
    text.num_hidden_layers = depth
    if kinds:
        text.layer_types = kinds[:depth]
    text.vocab_size = REPLICA_VOCABULARY
    for name in ("pad_token_id", "bos_token_id"):
        # Clipped rather than unset: some architectures count positions from the padding id, others insist on a number.
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), REPLICA_VOCABULARY - 1))
    for name in REPLICA_WIDTHS:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, REPLICA_INNER_WIDTH)
    if getattr(text, "sliding_window", None):
        text.sliding_window = min(text.sliding_window, REPLICA_WINDOW)
    return small


@torch.inference_mode()
def probe_error(paged: PagedCausalLM, limit: int = PROBE_TOKENS[0]) -> float:
    """Relative RMS difference between ragged passes over two interleaved streams and plain passes over each."""
    network = paged.network
    vocabulary = network.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(SEED)
    lengths = [min(length, limit) for length in PROBE_TOKENS]
    streams = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]
    paged.use_plain()
    plain = [
        network(input_ids=torch.tensor([ids], device=paged.device), use_cache=False, return_dict=True).logits[0].float()
        for ids in streams
    ]
    paged.use_paged()
    ragged = _ragged_logits(paged, streams)
    expected, got = torch.cat(plain), torch.cat(ragged)
    spread = (expected - expected.mean(1, keepdim=True)).square().mean().sqrt()
    return float((got - expected).square().mean().sqrt() / spread)


def _ragged_logits(paged: PagedCausalLM, streams: list[list[int]]) -> list[Tensor]:
    """Logits of all positions, fed in uneven chunks with the streams' blocks interleaved."""
    per_stream = -(-max(map(len, streams)) // paged.block_size)
    count = len(streams)
    paged.allocate_kv(count * per_stream)
    done = [0] * count
    found: list[list[Tensor]] = [[] for _ in streams]
    turn = 0
    while any(position < len(ids) for position, ids in zip(done, streams, strict=True)):
        spans = []
        for index, ids in enumerate(streams):
            rows = min(CHUNKS[(turn + index) % len(CHUNKS)], len(ids) - done[index])
            if rows:
                blocks = [block * count + index for block in range(per_stream)]
                spans.append(Span(index, ids[done[index] : done[index] + rows], done[index], rows, blocks, 0, 0))
        logits = paged.forward(spans).split([span.wanted for span in spans])
        for span, rows_logits in zip(spans, logits, strict=True):
            found[span.stream_id].append(rows_logits)
            done[span.stream_id] += span.wanted
        turn += 1
    return [torch.cat(parts) for parts in found]
