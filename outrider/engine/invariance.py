"""Start-up test: are a position's logits the same bits whatever else is in the batch?

Greedy and coupled text is identical with and without speculation only where they are. Three parts, all at the serving
thread count: every shape of linear layer at every row count that a step can have and every row position within it;
attention over several key blocks in various company; the whole model, chunked and beside other streams.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outrider.engine.attention import GatherLayer, Step
from outrider.engine.batch import EXACT_ROWS, Span, build_batch
from outrider.engine.causal_lm import PagedCausalLM
from outrider.engine.config import KEY_BLOCK
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.packing import PackedLinear
from outrider.engine.varlen import VarlenLayer

log = logging.getLogger(__name__)

# Linear layers are tried at all row counts up to FEW_ROWS; as far as these times allow, up to EXACT_ROWS and beyond.
FEW_ROWS = 16
EXACT_ROWS_S = 10.0
ALL_ROWS_S = 3.0
MORE_ROWS = (33, 64, 136)
# A whole-model check of this many tokens crosses a key block; models slower than this per small pass get a short one.
LONG_CHECK_TOKENS = KEY_BLOCK + 30
SHORT_CHECK_TOKENS = 24
SLOW_PASS_S = 0.25
ATTENTION_TOKENS = 3 * KEY_BLOCK
SEED = 20_230_211


class Verdict(NamedTuple):
    """Outcome of the start-up test; the note says what was covered, or the first difference."""

    invariant: bool
    note: str


def check_invariance(network: PagedCausalLM, max_rows: int) -> Verdict:
    """Tests a loaded model and sets the row rule under which it passes.

    Args:
        network: The model; its KV pool is replaced by a small one and has to be allocated again.
        max_rows: The most tokens a step may feed.
    """
    first_difference = None
    for rule in network.rules:
        network.rule = rule
        coverage: list[str] = []
        difference = (
            linear_difference(network, max_rows, coverage)
            or attention_difference(network)
            or model_difference(network, coverage)
            or compiled_difference(network, coverage)
        )
        if difference is None:
            coverage.append(f"{torch.get_num_threads()} threads")
            coverage.append(f"rows padded to {rule.minimum} and a multiple of {rule.multiple}")
            return Verdict(True, "; ".join(coverage))
        first_difference = first_difference or difference
    network.rule = network.rules[0]
    log.warning("results depend on the batch: %s", first_difference)
    return Verdict(False, str(first_difference))


@torch.inference_mode()
def linear_difference(network: PagedCausalLM, max_rows: int, coverage: list[str]) -> str | None:
    """The first linear layer, row count and row whose result depends on the row count, or None.

    Tries every row count that a step of up to `max_rows` tokens can have, as far as the time allows.
    """
    layers = list(_linear_layers(network.network))
    tested = 0
    skipped = 0
    for layer, width, dtype in layers:
        generator = torch.Generator().manual_seed(SEED)
        base = torch.randn((EXACT_ROWS, width), generator=generator).to(layer.weight.device, dtype)
        expected = _apply(layer, base)
        started = time.monotonic()
        for rows in network.rule.sizes(network.rule.pad(max_rows)):
            budget_s = ALL_ROWS_S if rows > EXACT_ROWS else EXACT_ROWS_S
            if rows > FEW_ROWS and time.monotonic() - started > budget_s / len(layers):
                skipped += 1
                continue
            for shift in (0, 3 * rows + 1) if rows < 16 else (rows,):
                index = (torch.arange(rows, device=base.device) + shift) % EXACT_ROWS
                wrong = (_apply(layer, base[index]) != expected[index]).any(1).nonzero()
                if len(wrong):
                    place = f"row {int(wrong[0])} of {rows} differs from the same row among {EXACT_ROWS}"
                    return f"linear layer {width} -> {expected.shape[1]}: {place}"
            tested += 1
    coverage.append(
        f"{len(layers)} linear shapes at {tested} row counts" + (f" ({skipped} left out)" if skipped else "")
    )
    return None


@torch.inference_mode()
def attention_difference(network: PagedCausalLM) -> str | None:
    """The first attention shape and company in which a row's result changes, or None."""
    for shape in dict.fromkeys(network.shapes.values()):
        difference = _layer_difference(network, shape)
        if difference is not None:
            return f"attention of {shape.query_heads}/{shape.kv_heads} heads, {shape.head_dim} wide: {difference}"
    return None


def _layer_difference(network: PagedCausalLM, shape: LayerShape) -> str | None:
    tokens, block_size = ATTENTION_TOKENS, network.block_size
    blocks = list(range(-(-tokens // block_size)))
    cache = KVCache({0: shape}, len(blocks), block_size)
    step = Step()
    layer = (VarlenLayer if network.backend == "varlen" else GatherLayer)(step, cache.layers[0], shape)
    generator = torch.Generator().manual_seed(SEED)

    def draw(heads: int, width: int) -> Tensor:
        return torch.randn((1, heads, tokens, width), generator=generator).to(shape.device, shape.dtype)

    query = draw(shape.query_heads, shape.head_dim)
    sinks = draw(shape.query_heads, 1)[0, :, 0, 0] if shape.sinks else None
    key, value = draw(shape.kv_heads, shape.head_dim), draw(shape.kv_heads, shape.value_dim)

    def run(pieces: Sequence[tuple[int, int]]) -> Tensor:
        spans = [Span(index, [0] * rows, start, 0, blocks, 0, 0) for index, (start, rows) in enumerate(pieces)]
        step.batch = build_batch(spans, block_size=block_size, scratch_block=cache.scratch_block, rule=network.rule)
        rows = torch.cat([torch.arange(start, start + count) for start, count in pieces])
        rows = torch.cat([rows, torch.zeros(step.batch.rows - len(rows), dtype=torch.int64)]).to(shape.device)
        out = layer(query[:, :, rows], key[:, :, rows], value[:, :, rows], None, shape.window, shape.softcap, sinks)
        return out[0, : step.batch.tokens]

    expected = run([(0, tokens)])
    for length in (1, 2, 3, 4, 5, 6, 7, 9, 13, 16, 31, 33, 64, 100):
        for mates in (1, 2, 5, 16):
            # Coprime strides put the pieces at all kinds of offsets within and across key blocks.
            starts = [(97 * mate + 61 * length) % (tokens - length) for mate in range(mates)]
            pieces = [(start, length if mate % 3 != 2 else max(1, length // 2)) for mate, start in enumerate(starts)]
            got = run(pieces)
            want = torch.cat([expected[start : start + count] for start, count in pieces])
            if not torch.equal(got, want):
                return f"pieces of {length} tokens in {mates} streams differ from one piece of {tokens}"
    return None


def model_difference(network: PagedCausalLM, coverage: list[str]) -> str | None:
    """Where the whole model's logits depend on chunking or company, or None."""
    network.allocate_kv(3 * (-(-LONG_CHECK_TOKENS // network.block_size) + 1))
    per_stream = -(-LONG_CHECK_TOKENS // network.block_size) + 1
    tables = [list(range(index * per_stream, (index + 1) * per_stream)) for index in range(3)]
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(network.vocab_rows, (2, LONG_CHECK_TOKENS), generator=generator).tolist()
    started = time.monotonic()
    network.forward([Span(0, ids[0][:2], 0, 1, tables[0], 0, 0)])
    slow = time.monotonic() - started > SLOW_PASS_S
    limit = getattr(network.network.config.get_text_config(), "max_position_embeddings", LONG_CHECK_TOKENS)
    tokens = SHORT_CHECK_TOKENS if slow or limit < LONG_CHECK_TOKENS else LONG_CHECK_TOKENS
    tail = 20
    expected = network.forward([Span(0, ids[0][:tokens], 0, tail, tables[0], 0, 0)])
    done = tokens - tail
    network.forward([Span(1, ids[0][:done], 0, 0, tables[1], 0, 0)])
    mate = 0
    for index, rows in enumerate((1, 5, 2, 9, 1, 2)):
        company = (4, 0, 1, 7, 2, 0)[index]
        spans = [Span(1, ids[0][done : done + rows], done, rows, tables[1], 0, 0)]
        if company:
            spans.insert(index % 2, Span(2, ids[1][mate : mate + company], mate, company, tables[2], 0, 0))
            mate += company
        logits = network.forward(spans)
        first = company if company and index % 2 == 0 else 0
        got = logits[first : first + rows]
        if not torch.equal(got, expected[done - tokens + tail :][:rows]):
            return f"logits at position {done} in a step of {rows} beside {company} differ from one pass of {tokens}"
        done += rows
    coverage.append(f"attention over {ATTENTION_TOKENS} keys, model over {tokens} tokens")
    return None


@torch.inference_mode()
def compiled_difference(network: PagedCausalLM, coverage: list[str]) -> str | None:
    """The row count at which a compiled pass gives a token other logits, or None; what it fuses is in no other test."""
    if network.compiled is None:
        return None
    generator = torch.Generator().manual_seed(SEED)
    sizes = (*network.rule.sizes(FEW_ROWS), *MORE_ROWS)
    most = sizes[-1]
    ids = torch.randint(network.vocab_rows, (most,), generator=generator).tolist()
    per_stream = -(-most // network.block_size)
    network.allocate_kv(2 * per_stream)
    mine, others = list(range(per_stream)), list(range(per_stream, 2 * per_stream))
    token = Span(0, ids[:1], 0, 1, mine, 0, 0)
    expected = network.forward([token])
    for rows in sizes:
        company = Span(1, ids[: rows - 1], 0, 1, others, 0, 0)
        for spans, row in (([token, company], 0), ([company, token], -1)):
            if not torch.equal(network.forward(spans)[row], expected[0]):
                return f"logits of one token in a compiled pass of {rows} rows differ from those of the token alone"
    coverage.append(f"the compiled pass at {len(sizes)} row counts")
    return None


def _linear_layers(network: nn.Module) -> Iterator[tuple[Any, int, torch.dtype]]:
    """One linear layer of each shape, with its input width and dtype."""
    seen = set()
    for module in network.modules():
        # Routers that are linear layers with a forward of their own are left to the check of the whole model.
        if isinstance(module, PackedLinear) or (
            isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        ):
            width, height = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            width, height = module.weight.shape
        else:
            continue
        kind = (type(module), width, height, module.bias is not None, module.weight.dtype)
        if kind not in seen and module.weight.dtype.is_floating_point:
            seen.add(kind)
            yield module, width, module.weight.dtype


def _apply(layer: nn.Module, rows: Tensor) -> Tensor:
    return layer(rows[None])[0]
