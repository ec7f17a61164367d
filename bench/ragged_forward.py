"""Cost of a ragged, paged forward against a plain DynamicCache forward of the same shapes.

Both run in one process, alternating, on the same weights; the figure is the ratio of medians (and, more robust on a
busy machine, of the fastest fifth). Above 1 the ragged pass is slower.

    python bench/ragged_forward.py --model FOLDER --streams 1,4,16 --tokens 1,5,9 --context 128,512
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from outrider.engine.blas import pin_blas

pin_blas()

import torch  # noqa: E402 (the BLAS is pinned first)
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402
from transformers.utils import logging as hf_logging  # noqa: E402

from outrider import models  # noqa: E402
from outrider.engine.batch import Span  # noqa: E402
from outrider.engine.causal_lm import PagedCausalLM  # noqa: E402
from outrider.engine.packing import pack_linears  # noqa: E402


class Cell(NamedTuple):
    """One row of the table; times in milliseconds."""

    streams: int
    tokens: int
    context: int
    plain_ms: float
    ragged_ms: float
    ratio: float
    ratio_fast: float


def main() -> None:
    """Prints the table."""
    args = parse_args()
    hf_logging.disable_progress_bar()
    # The cache argument has another name from transformers 5.24 on; the old one serves all versions in use.
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    plain = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa").eval()
    served = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    packed = 0 if args.unpacked else pack_linears(served)
    paged = PagedCausalLM(served)
    longest = max(args.context) + max(args.tokens)
    per_stream = -(-longest // paged.block_size)
    paged.allocate_kv(max(args.streams) * per_stream)
    print(f"{args.model}, {args.dtype}, {args.threads} threads, torch {torch.__version__}, {args.repeats} pairs a cell")
    print(f"{packed} packed linear layers on the ragged side")
    print("streams tokens context  plain ms  ragged ms  ratio  ratio of fastest fifth")
    for context in args.context:
        for streams in args.streams:
            for tokens in args.tokens:
                cell = measure(plain, paged, streams, tokens, context, args.repeats)
                print(
                    f"{cell.streams:7d} {cell.tokens:6d} {cell.context:7d} {cell.plain_ms:9.1f} {cell.ragged_ms:10.1f} "
                    f"{cell.ratio:6.2f} {cell.ratio_fast:6.2f}",
                    flush=True,
                )


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT_TARGET, type=_folder, help="model folder or name")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--unpacked", action="store_true", help="plain weight layout, to compare attention paths alone")
    parser.add_argument("--repeats", type=int, default=30, help="timed pairs per cell")
    for name, default in (("streams", "1,4,16"), ("tokens", "1,5,9"), ("context", "128,512")):
        parser.add_argument(f"--{name}", default=default, type=numbers, help=f"comma-separated, default {default}")
    return parser.parse_args()


def _folder(name: str) -> str:
    return models.resolve(name).path


def numbers(text: str) -> list[int]:
    """Comma-separated integers."""
    return [int(part) for part in text.split(",")]


@torch.inference_mode()
def measure(plain: Any, paged: PagedCausalLM, streams: int, tokens: int, context: int, repeats: int) -> Cell:
    """Times one cell: `streams` streams, each feeding `tokens` tokens behind `context` cached ones."""
    vocabulary = paged.vocab_rows
    rng = random.Random(0)
    prompts = [[rng.randrange(vocabulary) for _ in range(context)] for _ in range(streams)]
    news = [[rng.randrange(vocabulary) for _ in range(tokens)] for _ in range(streams)]

    cache = DynamicCache(config=plain.config)
    plain(input_ids=torch.tensor(prompts), past_key_values=cache, logits_to_keep=1)
    new_ids = torch.tensor(news)
    positions = torch.arange(context, context + tokens).expand(streams, -1)

    def run_plain() -> None:
        plain(input_ids=new_ids, position_ids=positions, past_key_values=cache, use_cache=True)

    def reset_plain() -> None:
        cache.crop(-tokens)

    per_stream = -(-(context + tokens) // paged.block_size)
    order = list(range(streams * per_stream))
    rng.shuffle(order)
    tables = [order[index * per_stream : (index + 1) * per_stream] for index in range(streams)]
    for index in range(streams):
        paged.forward([Span(index, prompts[index], 0, 0, tables[index], context, context)])
    spans = [Span(index, news[index], context, tokens, tables[index], context, context) for index in range(streams)]

    def run_ragged() -> None:
        paged.forward(spans)

    plain_s: list[float] = []
    ragged_s: list[float] = []
    for repeat in range(repeats + 3):
        first = repeat % 2 == 0
        for is_plain in (first, not first):
            elapsed = timed(run_plain if is_plain else run_ragged)
            if is_plain:
                reset_plain()
            if repeat >= 3:
                (plain_s if is_plain else ragged_s).append(elapsed)
    fast = max(1, repeats // 5)
    return Cell(
        streams,
        tokens,
        context,
        statistics.median(plain_s) * 1e3,
        statistics.median(ragged_s) * 1e3,
        statistics.median(ragged_s) / statistics.median(plain_s),
        sum(sorted(ragged_s)[:fast]) / sum(sorted(plain_s)[:fast]),
    )


def timed(function: Callable[[], None]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
