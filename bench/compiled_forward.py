"""Would `torch.compile` make a pass faster? The engine's pass against the same pass compiled, in turns in one process.

    python bench/compiled_forward.py [--shapes dynamic|static] [--streams 1,4,16] [--tokens 1,5] [--context 128]

The whole network is one graph. Attention over paged KV and the packed linear layers are operators that the compiler
takes as they are; norms, rotations, gates and residuals in between are inductor's to fuse. With `dynamic` shapes one
graph serves every row count, so that a row's bits cannot depend on the graph that a step happens to take; `static`
compiles each row count by itself. Above 1 the compiled pass is slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from outrider.engine.blas import pin_blas

pin_blas()

import torch  # noqa: E402 (the BLAS is pinned first)
from torch import Tensor, nn  # noqa: E402
from transformers import AttentionInterface, AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging as hf_logging  # noqa: E402

from bench.ragged_forward import numbers, timed  # noqa: E402
from outrider import models  # noqa: E402
from outrider.engine.batch import RowRule, Span  # noqa: E402
from outrider.engine.causal_lm import PagedCausalLM  # noqa: E402
from outrider.engine.packing import PackedLinear, pack_linears  # noqa: E402

LIBRARY = torch.library.Library("outrider_bench", "DEF")
LIBRARY.define("attend(Tensor q, Tensor k, Tensor v, int layer, float? scaling) -> Tensor")
LIBRARY.define("linear(Tensor rows, int layer) -> Tensor")
ATTENTION: list[Any] = []
LINEAR: list[PackedLinear] = []
WARM_UP = 3


def _attend(q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float | None) -> Tensor:
    return ATTENTION[layer].outrider_layer(q, k, v, scaling, None, None, None)  # type: ignore[no-any-return]


def _attended(q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float | None) -> Tensor:
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


def _linear(rows: Tensor, layer: int) -> Tensor:
    return LINEAR[layer](rows)  # type: ignore[no-any-return]


def _lined(rows: Tensor, layer: int) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], LINEAR[layer].out_features)


for _name, _real, _fake in (("attend", _attend, _attended), ("linear", _linear, _lined)):
    LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"outrider_bench::{_name}", _fake)


class Opaque(nn.Module):
    """A packed linear layer that the compiler does not look into."""

    def __init__(self, layer: PackedLinear) -> None:
        super().__init__()
        self.weight = layer.weight
        self._index = len(LINEAR)
        LINEAR.append(layer)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.ops.outrider_bench.linear(rows, self._index)  # type: ignore[no-any-return]


class Compiled(PagedCausalLM):
    """The engine's network with its pass compiled."""

    def __init__(self, network: Any, *, dynamic: bool) -> None:
        super().__init__(network)
        for module in self._candidates:
            if hasattr(module, "outrider_layer"):
                module.index = len(ATTENTION)
                ATTENTION.append(module)
        for parent in list(network.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, PackedLinear):
                    setattr(parent, name, Opaque(child))
        AttentionInterface.register("outrider_compiled", _opaque_attention)
        network.set_attn_implementation("outrider_compiled")
        self._pass = torch.compile(super()._logits, dynamic=dynamic, fullgraph=True)

    def _logits(self, input_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        made = getattr(self, "_pass", super()._logits)  # the first pass, which looks at the layers, comes before it
        return made(input_ids, positions, wanted)


def _opaque_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **extra: Any) -> tuple[Tensor, None]:
    return torch.ops.outrider_bench.attend(q, k, v, module.index, extra.get("scaling")), None


def main() -> None:
    arguments = _arguments()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    own, compiled = (_network(arguments, compiled=compiled) for compiled in (False, True))
    print(f"{arguments.model}, {arguments.dtype}, {arguments.threads} threads, torch {torch.__version__}")
    print("streams tokens  own ms  compiled ms  ratio  first compiled pass s  largest difference of a logit")
    ratios = {}
    for streams in arguments.streams:
        for tokens in arguments.tokens:
            spans = _spans(streams, tokens, arguments.context, own.block_size)
            expected = own.forward(spans)
            began_s = time.perf_counter()
            difference = float((compiled.forward(spans) - expected).abs().max())
            took_s = time.perf_counter() - began_s
            times: dict[PagedCausalLM, list[float]] = {own: [], compiled: []}
            for repeat in range(arguments.repeats + WARM_UP):
                for network in (own, compiled) if repeat % 2 else (compiled, own):
                    times[network].append(timed(lambda network=network: network.forward(spans)))  # type: ignore[misc]
            own_s, compiled_s = (statistics.median(times[network][WARM_UP:]) for network in (own, compiled))
            ratios[f"{streams}x{tokens}"] = round(compiled_s / own_s, 3)
            print(
                f"{streams:7} {tokens:6} {1e3 * own_s:7.1f} {1e3 * compiled_s:12.1f} {compiled_s / own_s:6.2f} "
                f"{took_s:22.1f} {difference:31.1e}",
                flush=True,
            )
    print(json.dumps({"bench": "compiled_forward", "shapes": arguments.shapes, "compiled_over_own": ratios}))


def _network(arguments: argparse.Namespace, *, compiled: bool) -> PagedCausalLM:
    dtype = getattr(torch, arguments.dtype)
    network = AutoModelForCausalLM.from_pretrained(models.resolve(arguments.model).path, dtype=dtype)
    pack_linears(network.to(arguments.device))
    made = Compiled(network, dynamic=arguments.shapes == "dynamic") if compiled else PagedCausalLM(network)
    made.rule = RowRule(4, 1)  # a compiler makes a case of its own of one row
    longest = arguments.context + max(arguments.tokens)
    made.allocate_kv(max(arguments.streams) * -(-longest // made.block_size))
    return made


def _spans(streams: int, tokens: int, context: int, block_size: int) -> list[Span]:
    """So many streams that feed so many tokens behind a context of zeros, which takes as long as any other."""
    per_stream = -(-(context + tokens) // block_size)
    return [
        Span(
            stream,
            [7 * stream + place for place in range(tokens)],
            context,
            tokens,
            [*range(stream * per_stream, (stream + 1) * per_stream)],
            0,
            0,
        )
        for stream in range(streams)
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT_TARGET)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shapes", choices=("dynamic", "static"), default="dynamic")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=30)
    for name, default in (("streams", "1,4,16"), ("tokens", "1,5")):
        parser.add_argument(f"--{name}", default=default, type=numbers)
    return parser.parse_args()


if __name__ == "__main__":
    main()
