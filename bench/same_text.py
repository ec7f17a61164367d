"""Is the text the same with speculation on and off, prompt for prompt, through real services?

    python bench/same_text.py [--dataset PROMPTS.jsonl] [--prompts N] [--draft ngram] [--tokens 64]

Every prompt is answered without speculation, one stream at a time, and with it, `--streams` at a time and each with
another gamma (1, 2, 3, 4, 5, 8), so that each prompt has other neighbours and other steps. Greedily, and with the
coupled rule at temperature 1 and a seed per prompt. Counted are identical texts; bar: all of them.

Target and draft are processes of their own, the coordinator's loop runs in this one. `--draft self` is the target's own
model on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.processes import services
from coordinator.decoder import Decoder, DecoderConfig, DecodingRequest
from loadtest.prompts import load
from outrider import models
from outrider.sampling import Rule, SamplingParams

GAMMAS = (4, 1, 2, 8, 3, 5)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "rule": Rule.COUPLED},
}


def main() -> None:
    arguments = _arguments()
    prompts = load("auto", arguments.dataset).prompts[: arguments.prompts]
    tokenizer = Tokenizer.from_file(str(Path(models.resolve(arguments.target).path) / "tokenizer.json"))
    chats = [
        tuple(tokenizer.encode(CHAT.format(prompt.text), add_special_tokens=False).ids[-arguments.most :])
        for prompt in prompts
    ]
    engine = ("--dtype", arguments.dtype, "--profile-seconds", "0")
    draft = arguments.target if arguments.draft == "self" else arguments.draft
    flags = {
        "target": ("--model", arguments.target, *engine),
        "draft": ("--model", draft, *(() if draft in models.LOOKUP_DRAFTS else engine)),
    }
    with services(flags) as addresses:
        found = asyncio.run(_compare(addresses, chats, arguments))
    print(json.dumps({"bench": "same_text", "target": arguments.target, "draft": arguments.draft, **found}))


CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""Another model than the default one reads this as plain text, which does for the comparison."""


async def _compare(
    addresses: dict[str, str], chats: Sequence[tuple[int, ...]], arguments: argparse.Namespace
) -> dict[str, Any]:
    decoder = Decoder(
        DecoderConfig(target=(addresses["target"],), draft=addresses["draft"], self_draft=arguments.draft == "self")
    )
    await decoder.start()
    found: dict[str, Any] = {"prompts": len(chats), "tokens": arguments.tokens}
    try:
        async with asyncio.timeout(60):
            while decoder.state.draft is None or not decoder.state.targets_up:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        info = decoder.state.target
        assert info is not None
        found |= {"dtype": info.dtype, "invariant": info.batch_invariant}
        for mode in arguments.modes.split(","):
            plain = await _texts(decoder, chats, mode, (0,), 1, arguments.tokens)
            began, counters = time.monotonic(), decoder.counters
            before = counters.num_draft_tokens, counters.num_accepted_tokens
            got = await _texts(decoder, chats, mode, GAMMAS, arguments.streams, arguments.tokens)
            drafted, accepted = counters.num_draft_tokens - before[0], counters.num_accepted_tokens - before[1]
            differing = [index for index, pair in enumerate(zip(plain, got, strict=True)) if pair[0] != pair[1]]
            same = len(chats) - len(differing)
            found[mode] = {"identical": same, "drafted": drafted, "accepted": accepted, "differing": differing}
            print(
                f"{mode}: {same} of {len(chats)} texts identical, {sum(map(len, plain))} tokens; {accepted} of "
                f"{drafted} drafted tokens accepted; {time.monotonic() - began:.0f} s",
                flush=True,
            )
    finally:
        await decoder.close()
    return found


async def _texts(
    decoder: Decoder, chats: Sequence[tuple[int, ...]], mode: str, gammas: Sequence[int], streams: int, tokens: int
) -> list[list[int]]:
    """The answers; the next one begins when any ends."""
    seats = asyncio.Semaphore(streams)
    fields = dict(MODES[mode])
    rule = fields.pop("rule", Rule.STANDARD)

    async def one(index: int) -> list[int]:
        async with seats:
            request = DecodingRequest(
                prompt_ids=chats[index],
                params=SamplingParams(max_tokens=tokens, **fields),
                rule=rule,
                seed=index,
                num_speculative_tokens=gammas[index % len(gammas)],
                deadline_s=3_600.0,
            )
            return [token async for emission in decoder.open(request) for token in emission.tokens]

    return list(await asyncio.gather(*(one(index) for index in range(len(chats)))))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="prompts; unset: the load test's own forty")
    parser.add_argument("--prompts", type=int, default=None, help="the first so many; unset: all")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--modes", default="greedy,coupled")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--most", type=int, default=4_000, help="the last so many tokens of a prompt are used")
    return parser.parse_args()


if __name__ == "__main__":
    main()
