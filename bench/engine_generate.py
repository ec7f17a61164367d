"""The engine's own loop against `generate` of transformers: greedy, one stream, same weights, dtype and threads.

    python bench/engine_generate.py [--model smollm2-135m] [--dtype bfloat16] [--threads 2] [--tokens 48] [--rounds 3]

Both decode the same prompt, alternating, after one round that is not timed; the figure is the ratio of medians (above 1
the engine is faster). The ids are compared too: transformers may round its rows otherwise, so they need not agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from outrider.engine.blas import pin_blas

pin_blas()

import torch  # noqa: E402 (the BLAS is pinned first)
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging as hf_logging  # noqa: E402

from outrider import models  # noqa: E402
from outrider.demo import PROMPT  # noqa: E402
from outrider.engine.config import EngineConfig  # noqa: E402
from outrider.engine.model import LoadedModel, load_model  # noqa: E402
from outrider.engine.span import Span  # noqa: E402
from outrider.sampling import SamplingParams  # noqa: E402
from outrider.seam import StreamOpen  # noqa: E402
from target_service.proposal import PLAIN  # noqa: E402
from target_service.round import Round  # noqa: E402
from target_service.scoring import judge  # noqa: E402

BAR = 1.0


def engine_ids(model: LoadedModel, prompt: list[int], tokens: int) -> list[int]:
    """What the engine's loop decodes."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    opened = StreamOpen(stream_id=1, prompt_length=len(prompt), params=params)
    blocks = list(range(-(-(len(prompt) + tokens) // model.info.block_size)))
    text, fed = list(prompt), 0
    while len(text) < len(prompt) + tokens:
        span = Span(1, text[fed:], fed, 1, blocks, len(prompt), len(text))
        (verdict,) = judge(model.forward([span]), [Round(opened, text, len(text), PLAIN)])
        if isinstance(verdict, Exception):
            raise verdict
        fed = len(text)
        text.append(verdict.bonus)
    return text[len(prompt) :]


def timed(decode: Callable[[], list[int]]) -> tuple[list[int], float]:
    started = time.perf_counter()
    return decode(), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    hf_logging.disable_progress_bar()
    folder = str(models.resolve(arguments.model).path)
    tokens = arguments.tokens
    with torch.inference_mode():
        config = EngineConfig(
            model=folder, dtype=arguments.dtype, threads=arguments.threads, kv_cache_tokens=4096, max_num_seqs=1
        )
        model = load_model(config)
        model.allocate_kv(model.num_blocks)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments.dtype)).eval()
        prompt: list[int] = AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
        ids = torch.tensor([prompt])
        # No end-of-sequence id: an id that only one of the two may choose would part the texts.
        options = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0, "eos_token_id": None}

        def by_transformers() -> list[int]:
            return list(plain.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())

        engine_s, plain_s = [], []
        for _ in range(arguments.rounds + 1):
            mine, seconds = timed(lambda: engine_ids(model, prompt, tokens))
            engine_s.append(seconds)
            theirs, seconds = timed(by_transformers)
            plain_s.append(seconds)
    ratio = statistics.median(plain_s[1:]) / statistics.median(engine_s[1:])
    alike = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), tokens)
    print(
        f"{arguments.model}, {arguments.dtype}, {arguments.threads} threads: engine "
        f"{tokens / statistics.median(engine_s[1:]):.1f} tokens/s, transformers "
        f"{tokens / statistics.median(plain_s[1:]):.1f}; ratio {ratio:.2f} (bar {BAR}); {alike} of {tokens} ids alike"
    )
    print(json.dumps({"bench": "engine_generate", "ratio": ratio, "bar": BAR, "alike": alike, "tokens": tokens}))


if __name__ == "__main__":
    main()
