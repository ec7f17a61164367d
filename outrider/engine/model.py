"""The model as the rest of the engine sees it, and how one is loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from outrider import phases
from outrider.dummy import LOAD_FORMAT, MARK
from outrider.engine.attention import IMPLEMENTATION, register
from outrider.engine.batch import Span
from outrider.engine.block_manager import Copy
from outrider.engine.capture import capture, why_eager
from outrider.engine.causal_lm import PagedCausalLM
from outrider.engine.config import EngineConfig
from outrider.engine.hidden_states import HiddenStates
from outrider.engine.info import ModelInfo, device_names, dummy_hash, eos_ids, name_and_revision, weight_hash
from outrider.engine.invariance import check_invariance
from outrider.engine.memory_plan import Workspace, measure, plan_blocks
from outrider.engine.packing import pack_linears
from outrider.engine.probe import probe_architecture, probe_weights
from outrider.engine.support import architecture_of, check_supported, longest_stream
from outrider.errors import InvalidArgument, ModelUnavailable

__all__ = ["LoadedModel", "Model", "ModelInfo", "load_model"]

log = logging.getLogger(__name__)

# Rows of hidden states, activations and masks of a full step, in multiples of the widest layer.
WORKSPACE_COPIES = 8


class Model(Protocol):
    """Computes logits for ragged batches; stubs implement it too."""

    info: ModelInfo

    @property
    def replayed(self) -> bool:
        """Whether the latest pass was replayed from a CUDA graph."""
        ...

    def forward(self, spans: Sequence[Span]) -> Tensor:
        """float32 logits [sum of wanted, vocab_rows], in span order."""
        ...

    def copy_kv(self, copies: Sequence[Copy]) -> None:
        """Copies KV between blocks, in this order."""
        ...


class LoadedModel:
    """A causal LM with weights.

    Attributes:
        info: Facts about it.
        num_blocks: KV blocks that the memory plan allows.
        hidden_states: Of the latest pass, for those who want them.
    """

    def __init__(
        self,
        network: PagedCausalLM,
        states: HiddenStates,
        info: ModelInfo,
        num_blocks: int,
        config: EngineConfig,
        room_for_graphs: int = 0,
    ) -> None:
        """
        Args:
            network: with its weights.
            states: its hidden states.
            info: facts about it.
            num_blocks: KV blocks that the memory plan allows.
            config: how the model was loaded.
            room_for_graphs: bytes that the memory plan left to captured steps.
        """
        self._network = network
        self._config = config
        self._room_for_graphs = room_for_graphs
        self.info = info
        self.num_blocks = num_blocks
        self.hidden_states = states

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocates KV for block ids 0 .. num_blocks - 1, and captures graphs over it; call once, before `forward`."""
        network, config = self._network, self._config
        network.allocate_kv(num_blocks)
        network.graphs = capture(
            network, self.hidden_states, config, longest=self.info.max_positions, room=self._room_for_graphs
        )
        if network.graphs is not None:
            self.info = replace(self.info, attention_backend=f"{self.info.attention_backend}+graphs")

    def forward(self, spans: Sequence[Span]) -> Tensor:
        """float32 logits [sum of wanted, vocab_rows], in span order."""
        return self._network.forward(spans)

    @property
    def replayed(self) -> bool:
        """Whether the latest pass was replayed from a CUDA graph."""
        return self._network.replayed

    def copy_kv(self, copies: Sequence[Copy]) -> None:
        """Copies KV between blocks, in this order."""
        self._network.copy_kv(copies)


def load_model(config: EngineConfig) -> LoadedModel:
    """Loads a model folder, proves its architecture and tests its numerics; KV is allocated separately.

    Sets torch's thread count for this process, and must run in the thread that will call `forward`.

    Raises:
        ModelUnavailable: the folder cannot be read as a model.
        ModelRefused: the engine does not run this architecture; names it and the reason.
        DoesNotFit: not even one stream's KV fits.
        InvalidArgument: the configuration contradicts the model or the device.
    """
    started = time.monotonic()
    folder = Path(config.model)
    hf_config = read_config(config)
    check_supported(hf_config)
    longest = longest_stream(hf_config, config.max_model_len)
    device = resolve_device(config)
    dtype = resolve_dtype(config, device)
    set_threads(config, dtype)
    register()
    phases.announce("load", f"{architecture_of(hf_config)}, {str(dtype).removeprefix('torch.')}")
    probe_architecture(hf_config, trust_remote_code=config.trust_remote_code)
    weights = _read_weights(config, hf_config, dtype)
    parameters = sum(weight.numel() for weight in weights.parameters())
    packed = pack_linears(weights)
    network = PagedCausalLM(weights, config.block_size)
    states = HiddenStates(weights)
    if config.compile:
        phases.announce("compile", "the first time a minute or two")
        states.want(range(states.count + 1) if states.count else ())  # later it would mean compiling anew
        network.compile()
    phases.announce("probe", "the served kernels against a plain forward, and for the same bits in every batch")
    probe_weights(network)
    verdict = check_invariance(network, config.max_num_batched_tokens)
    phases.announce("memory")
    workspace = _workspace(config, network)
    num_blocks = plan_blocks(
        measure(config, _weight_bytes(weights), workspace),
        config,
        block_size=network.block_size,
        bytes_per_token=network.kv_bytes_per_token,
        longest=longest,
    )
    if config.max_model_len is None and num_blocks * network.block_size < longest:
        longest = num_blocks * network.block_size
        log.warning("streams are limited to the %d tokens that the KV pool holds", longest)
    model_id, revision = name_and_revision(folder.resolve())
    model_id = config.model_id or model_id
    if config.is_dummy:
        model_id, revision = model_id.removesuffix(MARK) + MARK, LOAD_FORMAT
        log.warning("MEASURING ONLY: the weights of %s are random, and so is whatever it says", folder)
    name, uuid = device_names(network.device)
    info = ModelInfo(
        model_id=model_id,
        revision=config.revision or revision,
        architecture=architecture_of(hf_config),
        vocab_rows=network.vocab_rows,
        parameters=parameters,
        dtype=str(dtype).removeprefix("torch."),
        device=str(network.device),
        device_name=name,
        device_uuid=uuid,
        max_positions=longest,
        num_layers=len(network.shapes),
        kv_bytes_per_token=network.kv_bytes_per_token,
        eos_token_ids=eos_ids(folder, getattr(hf_config.get_text_config(), "eos_token_id", None)),
        weight_hash=dummy_hash(folder) if config.is_dummy else weight_hash(folder),
        attention_backend=network.backend + ("+compiled" if config.compile else ""),
        invariant=verdict.invariant,
        invariance_note=verdict.note,
        block_size=network.block_size,
        hidden_size=states.width,
    )
    log.info(
        "loaded %s (%s, %.0f M parameters, %s, %d packed layers, %s attention, %s) in %.1f s",
        info.model_id,
        info.architecture,
        info.parameters / 1e6,
        info.dtype,
        packed,
        info.attention_backend,
        "batch-invariant" if info.invariant else "not batch-invariant",
        time.monotonic() - started,
    )
    return LoadedModel(network, states, info, num_blocks, config, workspace.graphs)


def resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The type that `auto` means on this device: half precision wherever it is fast."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    capabilities = torch.cpu.get_capabilities()
    fast = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if fast else torch.float32


def resolve_device(config: EngineConfig) -> torch.device:
    if not config.on_cuda:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidArgument("device", f"{config.device!r} is asked for, but torch finds no CUDA device")
    device = torch.device("cuda:0" if config.device in ("auto", "cuda") else config.device)
    if device.index >= torch.cuda.device_count():
        raise InvalidArgument(
            "device", f"{config.device!r} is asked for; there are {torch.cuda.device_count()} devices"
        )
    return device


def set_threads(config: EngineConfig, dtype: torch.dtype) -> None:
    # MKL splits a float64 product over threads at rows that change its bits.
    threads = 1 if dtype == torch.float64 else config.threads
    if threads is not None:
        torch.set_num_threads(threads)


def read_config(config: EngineConfig) -> PretrainedConfig:
    """
    Raises:
        ModelUnavailable: the folder holds no configuration that transformers knows.
    """
    try:
        return AutoConfig.from_pretrained(
            config.model, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailable(f"{config.model} is not a readable model folder: {first_line(error)}") from error


def _read_weights(config: EngineConfig, hf_config: PretrainedConfig, dtype: torch.dtype) -> Any:
    if config.is_dummy:
        return _random_weights(config, hf_config, dtype)
    options: dict[str, Any] = {}
    if config.on_cuda:
        options["device_map"] = "auto" if config.device == "auto" else {"": config.device}
    try:
        return AutoModelForCausalLM.from_pretrained(
            config.model,
            config=hf_config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
            **options,
        )
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{config.model} cannot be loaded: {first_line(error)}") from error


def _random_weights(config: EngineConfig, hf_config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """The model's own initialisation, made on its device.

    Raises:
        InvalidArgument: it would have to be spread over several devices.
    """
    if config.device == "auto":
        raise InvalidArgument("device", "auto spreads a model that is read; dummy weights need one device")
    with torch.device(resolve_device(config)):
        return AutoModelForCausalLM.from_config(
            hf_config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            trust_remote_code=config.trust_remote_code,
        )


def first_line(error: Exception) -> str:
    """An error of a library in one line."""
    return str(error).strip().partition("\n")[0]


def _weight_bytes(weights: torch.nn.Module) -> int:
    tensors = [*weights.parameters(), *weights.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _workspace(config: EngineConfig, network: PagedCausalLM) -> Workspace:
    widths = (getattr(module, "out_features", 0) for module in network.network.modules())
    widest = max((width for width in widths if width != network.vocab_rows), default=network.vocab_rows)
    return Workspace.of(
        config,
        vocab_rows=network.vocab_rows,
        widest=widest,
        itemsize=network.dtype.itemsize,
        copies=WORKSPACE_COPIES,
        captures=why_eager(config, network) is None,
    )
