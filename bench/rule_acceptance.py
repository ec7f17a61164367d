"""What the coupled rule costs in acceptance: both rules on the same prompts, drafts and temperatures.

    python bench/rule_acceptance.py [--dataset PROMPTS.jsonl] [--prompts 24] [--tokens 48] [--drafts ngram,window:16]

Drafts: `ngram`, whose q is one-hot, so that both rules accept a token with chance p; `window:N`, the target's own model
that sees the first 4 and the last N tokens only, which is a q with p's shape and errors of its own; any model's name.
The standard rule accepts with chance sum min(p, q), the most that any rule can. The coupled rule draws both sides with
the same noise (Gumbel-max) and accepts where they agree, which is at least (1 - d) / (1 + d) of the time, where d is
the total variation between p and q (Daliri, Musco and Suresh, arXiv 2408.07978); in turn a seed names one text.

Printed per draft, temperature and rule: accepted of tested slots, tokens per drafted round (1 + accepted / rounds), and
coupled over standard. Intervals are the middle 95 % of draws of whole prompts, the same ones for both rules. Target and
drafts are processes of their own, the coordinator's loop runs in this one. Ctrl-C ends it with what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from bench.processes import services
from bench.same_text import CHAT
from coordinator.decoder import Decoder, DecoderConfig, DecodingRequest
from loadtest.bootstrap import F64, Interval, interval
from loadtest.evaluation.sample import spread
from loadtest.prompts import load
from outrider import models
from outrider.sampling import Rule, SamplingParams

RULES = (Rule.STANDARD, Rule.COUPLED)
DRAWS = 4_000


class Counts(NamedTuple):
    """Of every prompt's answer; arrays are parallel."""

    accepted: F64
    tested: F64
    rounds: F64

    def drawn(self, chosen: Any) -> Counts:
        """The sums over prompts `[draws, prompts]`."""
        return Counts(*(part[chosen].sum(axis=-1) for part in self))

    @property
    def alpha(self) -> F64:
        return self.accepted / np.maximum(self.tested, 1)

    @property
    def length(self) -> F64:
        return 1 + self.accepted / np.maximum(self.rounds, 1)


def main() -> None:
    arguments = _arguments()
    prompts = spread(load("auto", arguments.dataset).prompts, arguments.prompts)
    tokenizer = Tokenizer.from_file(str(Path(models.resolve(arguments.target).path) / "tokenizer.json"))
    chats = [
        tuple(tokenizer.encode(CHAT.format(prompt.text), add_special_tokens=False).ids[-arguments.most :])
        for prompt in prompts
    ]
    rows: list[dict[str, Any]] = []
    with (
        suppress(KeyboardInterrupt),
        services({"target": ("--model", arguments.target, *_engine(arguments))}) as target,
    ):
        for name in arguments.drafts.split(","):
            with services({"draft": _draft_flags(name, arguments)}) as draft:
                asyncio.run(_measure(target["target"], draft["draft"], name, chats, arguments, rows))
    setting = {name: getattr(arguments, name) for name in ("target", "prompts", "tokens", "gamma", "dtype")}
    print(json.dumps({"bench": "rule_acceptance", **setting, "rows": rows}))


def _engine(arguments: argparse.Namespace) -> tuple[str, ...]:
    # half of the cores each: threads of both sides on the same cores wait for each other in every parallel region
    threads = str(max(1, (os.cpu_count() or 2) // 2))
    return ("--dtype", arguments.dtype, "--profile-seconds", "0", "--threads", threads)


def _draft_flags(name: str, arguments: argparse.Namespace) -> tuple[str, ...]:
    if name in models.LOOKUP_DRAFTS:
        return ("--model", name)
    kind, _, window = name.partition(":")
    if kind == "window":
        return ("--model", arguments.target, "--draft-window", window, *_engine(arguments))
    return ("--model", name, *_engine(arguments))


async def _measure(
    target: str,
    draft: str,
    name: str,
    chats: Sequence[tuple[int, ...]],
    arguments: argparse.Namespace,
    rows: list[dict[str, Any]],
) -> None:
    decoder = Decoder(DecoderConfig(target=(target,), draft=draft, self_draft=name.startswith("window:")))
    await decoder.start()
    try:
        async with asyncio.timeout(60):
            while decoder.state.draft is None or not decoder.state.targets_up:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for temperature in map(float, arguments.temperatures.split(",")):
            began_s = time.monotonic()
            counts = [await _answers(decoder, chats, temperature, rule, arguments) for rule in RULES]
            row = {"draft": name, "temperature": temperature, **_judge(*counts)}
            rows.append(row)
            _show(row, time.monotonic() - began_s)
    finally:
        await decoder.close()


async def _answers(
    decoder: Decoder, chats: Sequence[tuple[int, ...]], temperature: float, rule: Rule, arguments: argparse.Namespace
) -> Counts:
    seats = asyncio.Semaphore(arguments.streams)

    async def one(index: int) -> tuple[int, int, int]:
        async with seats:
            stream = decoder.open(
                DecodingRequest(
                    prompt_ids=chats[index],
                    params=SamplingParams(max_tokens=arguments.tokens, temperature=temperature),
                    rule=rule,
                    seed=index,
                    num_speculative_tokens=arguments.gamma,
                    deadline_s=3_600.0,
                )
            )
            async for _ in stream:
                pass
            return stream.stats.num_accepted_draft_tokens, stream.stats.num_tested_tokens, stream.stats.num_spec_steps

    counts = await asyncio.gather(*(one(index) for index in range(len(chats))))
    return Counts(*np.asarray(counts, dtype=np.float64).T)


def _judge(standard: Counts, coupled: Counts) -> dict[str, Any]:
    prompts = len(standard.tested)
    chosen = np.random.default_rng(0).integers(prompts, size=(DRAWS, prompts))
    answer: dict[str, Any] = {}
    whole, draws = [], []
    for rule, counts in zip(RULES, (standard, coupled), strict=True):
        total, drawn = counts.drawn(np.arange(prompts)), counts.drawn(chosen)
        whole.append(total)
        draws.append(drawn)
        answer[rule.name.lower()] = {
            "accepted": int(total.accepted),
            "tested": int(total.tested),
            "rounds": int(total.rounds),
            "alpha": _figure(total.alpha, drawn.alpha),
            "tokens_per_round": _figure(total.length, drawn.length),
        }
    with np.errstate(divide="ignore", invalid="ignore"):
        answer["ratio_alpha"] = _figure(whole[1].alpha / whole[0].alpha, draws[1].alpha / draws[0].alpha)
        answer["ratio_tokens_per_round"] = _figure(whole[1].length / whole[0].length, draws[1].length / draws[0].length)
    return answer


def _figure(value: F64, draws: F64) -> list[float]:
    """[value, low, high]."""
    bounds: Interval = interval(draws)
    return [round(float(number), 4) for number in (value, *bounds)]


def _show(row: dict[str, Any], took_s: float) -> None:
    print(f"{row['draft']}, temperature {row['temperature']:g} ({took_s:.0f} s)")
    for rule in RULES:
        name = rule.name.lower()
        own = row[name]
        print(
            f"  {name:9} {own['accepted']:5d} of {own['tested']:5d} slots accepted: {_text(own['alpha'])}, "
            f"{_text(own['tokens_per_round'])} tokens per round"
        )
    print(
        f"  coupled over standard: acceptance {_text(row['ratio_alpha'])}, "
        f"tokens per round {_text(row['ratio_tokens_per_round'])}",
        flush=True,
    )


def _text(figure: Sequence[float]) -> str:
    value, low, high = figure
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="prompts; unset: the load test's own forty")
    parser.add_argument("--prompts", type=int, default=24, help="so many, spread over the tasks")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafts", default="ngram,window:16")
    parser.add_argument("--temperatures", default="1,0.7")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--most", type=int, default=256, help="the last so many tokens of a prompt are used")
    return parser.parse_args()


if __name__ == "__main__":
    main()
