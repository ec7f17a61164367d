"""A transformers causal LM run on ragged batches and paged KV."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.engine import attention, experts
from outrider.engine.attention import DenseLayer, GatherLayer, Step
from outrider.engine.batch import RaggedBatch, RowRule, Span, build_batch
from outrider.engine.block_manager import Copy
from outrider.engine.compiled import Pass, compile_pass, rules_for, warm_up
from outrider.engine.config import VARLEN_PAGE
from outrider.engine.graphs import Graphs
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.packing import all_packed
from outrider.engine.support import architecture_of
from outrider.engine.transfer import to_device
from outrider.engine.varlen import VarlenLayer, varlen_obstacle
from outrider.errors import InvalidArgument, ModelRefused

log = logging.getLogger(__name__)

GATHER_BLOCK = 16
OBSERVED_TOKENS = 4

# Row counts at which linear layers were found batch-invariant and, in bfloat16, fastest; the start-up self-test moves
# to the next one where a machine needs it.
CPU_ROW_RULES: dict[torch.dtype, tuple[RowRule, ...]] = {
    torch.bfloat16: (RowRule(4, 1), RowRule(4, 4), RowRule(16, 16)),
    torch.float16: (RowRule(4, 1), RowRule(4, 4), RowRule(16, 16)),
    torch.float32: (RowRule(4, 1), RowRule(4, 4), RowRule(16, 16)),
    torch.float64: (RowRule(4, 4), RowRule(16, 16)),
}
# oneDNN's float32 kernels give a row the same bits at every row count, so that a plain step needs no padding.
PACKED_FLOAT32_RULE = RowRule(1, 1)
# On GPUs the kernel is chosen by the row count: few, large sizes keep it the same, nearly free while memory-bound.
CUDA_ROW_RULES = (RowRule(16, 16), RowRule(64, 64), RowRule(128, 128))


class PagedCausalLM:
    """Runs ragged batches; not thread-safe, the engine's one thread owns it.

    Attributes:
        network: The transformers model.
        shapes: What each attention layer was seen to pass, in layer order.
        vocab_rows: Rows of the output head.
        backend: `gather` or `varlen`.
        block_size: Tokens per KV block.
        rule: Row counts that batches are padded to.
        kv: The KV cache, once allocated.
        graphs: Captured steps over that KV, if any.
        compiled: The pass in compiled form, if it is.
        replayed: Whether the latest step was one of them.
    """

    def __init__(self, network: Any, block_size: int | None = None) -> None:
        """Prepares a loaded model.

        Args:
            network: A transformers causal LM.
            block_size: Tokens per KV block; unset means the path's default.

        Raises:
            ModelRefused: its attention cannot be reached or asks for something not supported.
            InvalidArgument: the attention path cannot use this block size.
        """
        attention.register()
        experts.register()
        self.network = network.eval()
        self.use_paged()
        self.device = network.get_input_embeddings().weight.device
        self.dtype: torch.dtype = network.dtype
        self.kv: KVCache | None = None
        self.graphs: Graphs | None = None
        self.compiled: Pass | None = None
        self.replayed = False
        self._step = Step()
        decoder = network.get_decoder()
        # Where a class calls its output head `decoder`, transformers returns that.
        self._decoder = network.base_model if isinstance(decoder, torch.nn.Linear) else decoder
        self._candidates = [m for m in network.modules() if isinstance(getattr(m, "layer_idx", None), int)]
        self._keeps_logits = "logits_to_keep" in inspect.signature(network.forward).parameters
        self.shapes: dict[int, LayerShape] = {}
        self.vocab_rows = self._observe()
        self.backend = self._choose_backend()
        self.block_size = block_size or (VARLEN_PAGE if self.backend == "varlen" else GATHER_BLOCK)
        if self.backend == "varlen" and self.block_size % VARLEN_PAGE:
            raise InvalidArgument(
                "block_size", f"{self.block_size}: paged FlashAttention takes multiples of {VARLEN_PAGE}"
            )
        if self.backend == "gather" and 256 % self.block_size:
            raise InvalidArgument("block_size", f"{self.block_size}: the gather path takes divisors of 256")
        self.rules = self._row_rules()
        self.rule = self.rules[0]

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one position over all layers."""
        return sum(shape.bytes_per_token for shape in self.shapes.values())

    def compile(self) -> None:
        """Compiles the pass; see `outrider.engine.compiled`. KV has to be allocated behind it.

        Raises:
            InvalidArgument: it cannot be compiled, and why.
        """
        self.rules = rules_for(self.rules)
        self.rule = self.rules[0]
        self.compiled = compile_pass(self, self._logits)
        warm_up(self)

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocates the KV pool, in place of any earlier one; block ids 0 .. num_blocks - 1 may be used in spans."""
        self.kv = self.graphs = None
        kv = KVCache(self.shapes, num_blocks, self.block_size)
        layer_type = VarlenLayer if self.backend == "varlen" else GatherLayer
        for index, shape in self.shapes.items():
            self._candidates[index].outrider_layer = layer_type(self._step, kv.layers[index], shape)
        self.kv = kv

    def copy_kv(self, copies: Sequence[Copy]) -> None:
        """Copies KV between blocks; see `KVCache.copy`."""
        if self.kv is None:
            raise RuntimeError("allocate_kv() comes before copy_kv()")
        self.kv.copy(copies)

    def use_paged(self) -> None:
        """Makes the network compute attention and experts the engine's way."""
        self._use(attention.IMPLEMENTATION, experts.IMPLEMENTATION)

    def use_plain(self) -> None:
        """Makes the network compute attention and experts its own way, as the probe's reference."""
        self._use("eager", "eager")

    def _use(self, attention_name: str, experts_name: str) -> None:
        self.network.set_attn_implementation(attention_name)
        # Quantized experts have kernels of their own, which know no other implementation.
        if getattr(self.network.config, "quantization_config", None) is None:
            self.network.set_experts_implementation(experts_name)

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Feeds the spans' tokens, writes their KV and returns the wanted logits.

        Args:
            spans: At least one, of different streams, each with at least one token.

        Returns:
            float32 [sum of wanted, vocab_rows], in span order.
        """
        if self.kv is None:
            raise RuntimeError("allocate_kv() comes before forward()")
        batch = self.batch(spans)
        if batch.new_blocks:
            self.kv.clear(batch.new_blocks)
        logits = None if self.graphs is None else self.graphs.forward(batch)
        self.replayed = logits is not None
        if logits is None:
            logits = self.eager(batch)
        # A copy even where the type stays: what a graph wrote is written anew by the next step.
        return logits[: batch.wanted_count].to(torch.float32, copy=self.graphs is not None)

    def batch(self, spans: Sequence[Span]) -> RaggedBatch:
        """Lays spans out for this model's KV."""
        assert self.kv is not None
        return build_batch(spans, block_size=self.block_size, scratch_block=self.kv.scratch_block, rule=self.rule)

    def eager(self, batch: RaggedBatch) -> Tensor:
        """[padded wanted, vocab_rows] in the model's dtype, by launching every kernel."""
        ids, positions = to_device(batch.ids, self.device)[None], to_device(batch.positions, self.device)[None]
        return self.run(ids, positions, to_device(batch.wanted, self.device), batch)

    def run(self, ids: Tensor, positions: Tensor, wanted: Tensor, batch: RaggedBatch) -> Tensor:
        """A pass over device memory; `batch` says to attention layers who looks where.

        Args:
            ids, positions: [1, rows].
            wanted: [n] rows whose logits are wanted.

        Returns:
            [n, vocab_rows] in the model's dtype.
        """
        self._step.batch = batch
        try:
            if self.compiled is not None:
                # Keys of prompt chunks without a wanted row are made by the same code as all others.
                rows = wanted if len(wanted) else wanted.new_zeros(self.rule.pad(1))
                return self.compiled(ids, positions, rows)[: len(wanted)]
            if not len(wanted):
                self._decoder(input_ids=ids, position_ids=positions, use_cache=False)
                return torch.empty((0, self.vocab_rows), dtype=self.dtype, device=self.device)
            return self._logits(ids, positions, wanted)
        finally:
            self._step.batch = None

    def _logits(self, input_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """[wanted, vocab_rows] in the model's dtype."""
        if self._keeps_logits:
            out = self.network(
                input_ids=input_ids, position_ids=positions, use_cache=False, logits_to_keep=wanted, return_dict=True
            )
            return out.logits[0]
        out = self._decoder(input_ids=input_ids, position_ids=positions, use_cache=False, return_dict=True)
        return self.network.get_output_embeddings()(out.last_hidden_state[0].index_select(0, wanted))

    @torch.inference_mode()
    def _observe(self) -> int:
        """One small plain pass, which shows what each layer passes to the attention function."""
        architecture = architecture_of(self.network.config)
        for index, module in enumerate(self._candidates):
            module.outrider_layer = DenseLayer(self.shapes, index)
        ids = torch.arange(OBSERVED_TOKENS, device=self.device)[None]
        logits = self._logits(ids, ids, ids[0])
        layers = self.network.config.get_text_config().num_hidden_layers
        if len(self.shapes) > layers:
            raise ModelRefused(
                f"{architecture}: {len(self.shapes)} modules call transformers' AttentionInterface for {layers} layers"
            )
        if len(self.shapes) < layers:
            raise ModelRefused(
                f"{architecture}: only {len(self.shapes)} of {layers} layers call transformers' AttentionInterface"
            )
        return logits.shape[-1]

    def _row_rules(self) -> tuple[RowRule, ...]:
        if self.device.type == "cuda":
            return CUDA_ROW_RULES
        rules = CPU_ROW_RULES[self.dtype]
        if self.dtype == torch.float32 and all_packed(self.network):
            return (PACKED_FLOAT32_RULE, *rules)
        return rules

    def _choose_backend(self) -> str:
        obstacles = {obstacle for shape in self.shapes.values() if (obstacle := varlen_obstacle(shape))}
        if not obstacles:
            return "varlen"
        if self.device.type == "cuda":
            log.info("attention by gathering: %s", "; ".join(sorted(obstacles)))
        return "gather"
