"""The engine's frozen configuration; every default is written here once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from outrider.dummy import LOAD_FORMAT, LOAD_FORMATS
from outrider.errors import InvalidArgument

Dtype = Literal["auto", "bfloat16", "float16", "float32", "float64"]

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
DEVICE = re.compile(r"cpu|auto|cuda(:\d+)?")

# Keys per attention block: a row attends over its position rounded up to this many keys, whatever else is in the batch.
KEY_BLOCK = 256
# Paged FlashAttention-2 reads pages of a multiple of this many tokens.
VARLEN_PAGE = 256
# Steps of more rows take a GPU longer than launching their kernels takes the host.
MAX_GRAPH_ROWS = 512


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one model is loaded and run.

    Attributes:
        model: Local folder of a Hugging Face causal LM (config.json and safetensors).
        model_id: Name reported in `ModelInfo`; unset means the folder's name.
        revision: Revision reported in `ModelInfo`; unset means the snapshot's, or `local`.
        dtype: Of weights, activations and KV. `auto`: bfloat16 where fast, else float32 (CPU) or float16 (CUDA).
        device: `cpu`, `cuda`, `cuda:N`, or `auto` (layers spread over all GPUs).
        max_model_len: Longest stream in tokens; unset means what the model (and the KV pool) allows.
        block_size: Tokens per KV block; unset means 16 on the gather path and 256 on the paged variable-length path.
        kv_cache_tokens: Size of the KV pool in tokens; unset means derived from the memory plan.
        max_num_seqs: Streams that may be scheduled in one step.
        max_num_batched_tokens: Tokens fed in one step, over all streams.
        logits_rows: Rows of logits that a step can ask for; unset means one per stream. For the memory plan.
        gpu_memory_utilization: Share of the GPU's memory for weights, KV and workspace together, in (0, 1].
        load_format: `auto` reads the weights; `dummy` makes random ones from config.json alone, for measuring speed.
        enforce_eager: Never replays steps from CUDA graphs.
        compile: Compiles the pass with `torch.compile` (CPU only; needs a C++ compiler).
        max_cudagraph_capture_size: Rows of the largest step that is captured in a CUDA graph, 1 .. `MAX_GRAPH_ROWS`;
            unset means `logits_rows`, but at least two rows for each of `max_num_seqs` streams.
        threads: Torch threads of the engine thread; unset leaves torch's own choice.
        trust_remote_code: Whether a model folder may bring its own Python code.
    """

    model: str
    model_id: str | None = None
    revision: str | None = None
    dtype: Dtype = "auto"
    device: str = "cpu"
    max_model_len: int | None = None
    block_size: int | None = None
    kv_cache_tokens: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    logits_rows: int | None = None
    gpu_memory_utilization: float = 0.9
    load_format: str = "auto"
    enforce_eager: bool = False
    compile: bool = False
    max_cudagraph_capture_size: int | None = None
    threads: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidArgument("model", "is empty; it names a local model folder")
        if self.dtype not in DTYPES:
            raise InvalidArgument("dtype", f"{self.dtype!r} is not one of {', '.join(DTYPES)}")
        if not DEVICE.fullmatch(self.device):
            raise InvalidArgument("device", f"{self.device!r} is not cpu, auto, cuda or cuda:N")
        if self.load_format not in LOAD_FORMATS:
            raise InvalidArgument("load_format", f"{self.load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
        if self.block_size is not None and not is_block_size(self.block_size):
            raise InvalidArgument(
                "block_size", f"{self.block_size} neither divides {KEY_BLOCK} nor is a multiple of {VARLEN_PAGE}"
            )
        for field in ("max_model_len", "kv_cache_tokens", "logits_rows", "threads"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InvalidArgument(field, f"{value} is below 1")
        if self.max_num_seqs < 1:
            raise InvalidArgument("max_num_seqs", f"{self.max_num_seqs} is below 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidArgument(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} is below max_num_seqs ({self.max_num_seqs}): one token each must fit",
            )
        if self.max_cudagraph_capture_size is not None and not 1 <= self.max_cudagraph_capture_size <= MAX_GRAPH_ROWS:
            raise InvalidArgument(
                "max_cudagraph_capture_size", f"{self.max_cudagraph_capture_size} is outside 1 .. {MAX_GRAPH_ROWS}"
            )
        if self.compile and self.on_cuda:
            raise InvalidArgument("compile", "is for the CPU only; on a card steps are replayed from CUDA graphs")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InvalidArgument("gpu_memory_utilization", f"{self.gpu_memory_utilization} is outside (0, 1]")
        if self.dtype == "float64" and self.threads not in (None, 1):
            raise InvalidArgument("threads", f"{self.threads} with dtype float64, whose bits hold on one thread only")

    @property
    def graph_rows(self) -> int:
        """Rows of the largest step that is captured, where steps are."""
        rows = self.max_cudagraph_capture_size
        if rows is None:
            rows = min(max(2 * self.max_num_seqs, self.logits_rows or 0), MAX_GRAPH_ROWS)
        return min(rows, self.max_num_batched_tokens)

    @property
    def is_dummy(self) -> bool:
        """Whether the weights are random."""
        return self.load_format == LOAD_FORMAT

    @property
    def on_cuda(self) -> bool:
        """Whether the model's layers live on GPUs."""
        return self.device != "cpu"


def is_block_size(tokens: int) -> bool:
    """Whether KV blocks of this many tokens suit one of the attention paths."""
    return tokens > 0 and (KEY_BLOCK % tokens == 0 or tokens % VARLEN_PAGE == 0)
