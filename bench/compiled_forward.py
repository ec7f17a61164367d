"""What `--compile` does to a pass: the engine's ordinary pass against its compiled one, in turns in one process.

    python bench/compiled_forward.py [--streams 1,4,16] [--tokens 1,5] [--context 128]

Above 1 the compiled pass is slower. It is never run on a single row, so a plain step of one stream has two there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial

from outrider.engine.blas import pin_blas
from outrider.engine.code_cache import keep_compiled_code
from outrider.fetch.cache import cache_root

pin_blas()
keep_compiled_code(cache_root() / "inductor")

import torch  # noqa: E402 (the environment comes first)
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging as hf_logging  # noqa: E402

from bench.ragged_forward import numbers, timed  # noqa: E402
from outrider import models  # noqa: E402
from outrider.engine.causal_lm import PagedCausalLM  # noqa: E402
from outrider.engine.packing import pack_linears  # noqa: E402
from outrider.engine.span import Span  # noqa: E402

WARM_UP = 3


def main() -> None:
    arguments = _arguments()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    plain, compiled = _network(arguments), _network(arguments)
    began_s = time.perf_counter()
    compiled.compile()
    took_s = time.perf_counter() - began_s
    longest = arguments.context + max(arguments.tokens)
    for network in (plain, compiled):
        network.allocate_kv(max(arguments.streams) * -(-longest // network.block_size))
    print(
        f"{arguments.model}, {arguments.dtype}, {arguments.threads} threads, torch {torch.__version__}, "
        f"compiled in {took_s:.1f} s"
    )
    print("streams tokens  plain ms  compiled ms  ratio  largest difference of a logit")
    ratios = {}
    for streams in arguments.streams:
        for tokens in arguments.tokens:
            spans = _spans(streams, tokens, arguments.context, plain.block_size)
            difference = float((compiled.forward(spans) - plain.forward(spans)).abs().max())
            times: dict[PagedCausalLM, list[float]] = {plain: [], compiled: []}
            for repeat in range(arguments.repeats + WARM_UP):
                for network in (plain, compiled) if repeat % 2 else (compiled, plain):
                    times[network].append(timed(partial(network.forward, spans)))  # type: ignore[arg-type]
            plain_s, compiled_s = (statistics.median(times[network][WARM_UP:]) for network in (plain, compiled))
            ratios[f"{streams}x{tokens}"] = round(compiled_s / plain_s, 3)
            print(
                f"{streams:7} {tokens:6} {1e3 * plain_s:9.1f} {1e3 * compiled_s:12.1f} {compiled_s / plain_s:6.2f} "
                f"{difference:30.1e}",
                flush=True,
            )
    print(json.dumps({"bench": "compiled_forward", "compile_s": round(took_s, 1), "compiled_over_plain": ratios}))


@torch.inference_mode()
def _network(arguments: argparse.Namespace) -> PagedCausalLM:
    dtype = getattr(torch, arguments.dtype)
    network = AutoModelForCausalLM.from_pretrained(models.resolve(arguments.model).path, dtype=dtype)
    pack_linears(network)
    return PagedCausalLM(network)


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
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=30)
    for name, default in (("streams", "1,4,16"), ("tokens", "1,5")):
        parser.add_argument(f"--{name}", default=default, type=numbers)
    return parser.parse_args()


if __name__ == "__main__":
    main()
