"""Speculative over plain decoding at batch 1, in one run, by task: the figure a pair is judged by.

    python bench/pair_speed.py --dataset PROMPTS.jsonl --draft ngram --tasks summarization,rag,translation --prompts 6

Starts a stack of its own. Every prompt is answered plainly and by speculation in alternating order, greedily unless
`--temperature` says otherwise, with the same number of tokens; the ratio per prompt is the result and its median per
task is printed, with the acceptance that explains it. Prompts: JSON lines with `category` and `turns` (the first turn
is used).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from pathlib import Path

from outrider.client import Answer, Client, request
from outrider.fetch.reporter import LogReporter
from outrider.local.options import StackOptions
from outrider.local.stack import make_plan, private
from tests.model.prompts import BUILT_IN

CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories of the multi-turn chat task."""


def main() -> None:
    arguments = _arguments()
    prompts = _prompts(arguments.dataset, arguments.tasks.split(","), arguments.prompts, arguments.max_characters)
    options = StackOptions(
        target=arguments.target,
        draft=arguments.draft,
        dtype=arguments.dtype,
        num_speculative_tokens=arguments.num_speculative_tokens,
    )
    with (
        private(options, make_plan(options), LogReporter(), print) as stack,
        Client(stack.state.grpc) as client,
    ):
        _answer(client, "Say hello.", arguments, speculate=True)
        summary = {}
        print(f"{'task':16} {'ratio':>6} {'plain/s':>8} {'spec/s':>8} {'MAL':>5} {'accepted':>9} {'identical':>10}")
        for task, texts in prompts.items():
            summary[task] = _measure(client, task, texts, arguments)
    ratios = [row["ratio"] for row in summary.values()]
    print(json.dumps({"draft": arguments.draft, "median_ratio": round(statistics.median(ratios), 3), "tasks": summary}))


def _measure(client: Client, task: str, texts: list[str], arguments: argparse.Namespace) -> dict[str, float]:
    ratios, plain_rates, rates, identical = [], [], [], 0
    steps = drafted = accepted = 0
    for index, text in enumerate(texts):
        order = (False, True) if index % 2 else (True, False)
        answers = {speculate: _answer(client, text, arguments, speculate=speculate) for speculate in order}
        plain, speculative = answers[False], answers[True]
        identical += plain.token_ids == speculative.token_ids
        if len(plain.token_ids) < 2 or len(speculative.token_ids) < 2:
            continue
        plain_rates.append(plain.tokens_per_s)
        rates.append(speculative.tokens_per_s)
        ratios.append(speculative.tokens_per_s / plain.tokens_per_s)
        steps += int(speculative.metrics["num_spec_steps"])  # type: ignore[arg-type]
        drafted += int(speculative.metrics["num_draft_tokens"])  # type: ignore[arg-type]
        accepted += int(speculative.metrics["num_accepted_draft_tokens"])  # type: ignore[arg-type]
    row = {
        "ratio": round(statistics.median(ratios), 3),
        "plain_tokens_per_s": round(statistics.median(plain_rates), 1),
        "tokens_per_s": round(statistics.median(rates), 1),
        "mean_acceptance_length": round(1 + accepted / steps, 3) if steps else 0.0,
        "draft_acceptance_rate": round(accepted / drafted, 3) if drafted else 0.0,
        "identical": identical,
        "prompts": len(texts),
    }
    print(
        f"{task:16} {row['ratio']:6.2f} {row['plain_tokens_per_s']:8.1f} {row['tokens_per_s']:8.1f} "
        f"{row['mean_acceptance_length']:5.2f} {row['draft_acceptance_rate']:9.2f} {identical:6d}/{len(texts)}",
        flush=True,
    )
    return row


def _answer(client: Client, text: str, arguments: argparse.Namespace, *, speculate: bool) -> Answer:
    answer = Answer()
    message = request(
        text,
        chat=True,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        speculate=speculate,
    )
    for _ in client.generate(message, answer):
        pass
    return answer


def _prompts(dataset: Path | None, tasks: list[str], count: int, max_characters: int) -> dict[str, list[str]]:
    """`count` prompts per task, drawn with a fixed seed from those that are short enough to run in reasonable time."""
    if dataset is None:
        return {task: list(texts[:count]) for task, texts in BUILT_IN.items()}
    by_task: dict[str, list[str]] = defaultdict(list)
    with dataset.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            task = "chat" if row["category"] in CHAT else row["category"]
            if len(row["turns"][0]) <= max_characters:
                by_task[task].append(row["turns"][0])
    unknown = [task for task in tasks if task not in by_task]
    if unknown:
        raise SystemExit(f"no such task: {', '.join(unknown)}; there are {', '.join(sorted(by_task))}")
    return {task: random.Random(0).sample(by_task[task], min(count, len(by_task[task]))) for task in tasks}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="prompts; unset: a small set of this project's own, four tasks")
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-speculative-tokens", default="auto")
    parser.add_argument("--tasks", default="chat,translation,summarization,qa,math_reasoning,rag")
    parser.add_argument("--prompts", type=int, default=6, help="per task")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-characters", type=int, default=6000, help="longer prompts are left out")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
