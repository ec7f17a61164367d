"""Acceptance of an EAGLE-3 draft on benchmark prompts, by task and position, without a service.

    python bench/draft_acceptance.py DRAFT_FOLDER BENCHMARK.jsonl [--target smollm2-135m] [--per-task 8] [--tokens 96]

The target answers the first turn of each prompt (greedy, and at temperature 1); the draft is unrolled from every
position of those answers, as it would be in serving: features of the last 64 positions of the prompt, then of what was
accepted. `length` is the mean number of tokens of a greedy round at that gamma, the target's own token included; a
round may start at any position, so it is the figure for rounds evenly spread over the text. `alpha` is
E[sum min(p, q)] at temperature 1.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional as F
from transformers import AutoTokenizer

from outrider import models
from outrider.engine.eagle3_checkpoint import load
from outrider.training.flight import Asked
from outrider.training.generate import render, stop_ids_of
from outrider.training.held_out import measure
from outrider.training.prompts import Prompt
from outrider.training.teacher import Lesson, Teacher
from outrider.training.unroll import Unroll

BATCH = 24
CPU = torch.device("cpu")
CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def prompts(path: Path, per_task: int) -> dict[str, list[str]]:
    """The first turns of evenly spread prompts of each of the six tasks."""
    tasks: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        tasks["chat" if entry["category"] in CHAT else entry["category"]].append(entry["turns"][0])
    return {task: turns[:: max(1, len(turns) // per_task)][:per_task] for task, turns in tasks.items()}


def answers(
    teacher: Teacher, tasks: dict[str, list[list[int]]], tokens: int, stop_ids: frozenset[int]
) -> dict[tuple[str, float], list[Lesson]]:
    """Answers by task and temperature; prompts of like length are answered together, whatever their task."""
    asked = [(task, Asked(ids, t)) for task, prompts in tasks.items() for ids in prompts for t in (0.0, 1.0)]
    asked.sort(key=lambda one: len(one[1].ids))
    generator = torch.Generator().manual_seed(0)
    found: dict[tuple[str, float], list[Lesson]] = defaultdict(list)
    for start in range(0, len(asked), BATCH):
        some = asked[start : start + BATCH]
        made = teacher.answer([a for _, a in some], max_tokens=tokens, stop_ids=stop_ids, generator=generator)
        for (task, one), lesson in zip(some, made, strict=True):
            found[task, one.temperature].append(lesson)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path)
    parser.add_argument("benchmark", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--per-task", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = models.resolve(arguments.target).path
    head = load(arguments.draft)
    teacher = Teacher.load(folder, head.config.feature_layers, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    table = teacher.network.get_input_embeddings().weight.detach()
    unroll = Unroll(head, lambda ids: F.embedding(ids, table), torch.ones(head.fc.in_features))
    tasks = {
        task: [render(tokenizer, Prompt(({"role": "user", "content": turn},), task)) for turn in turns]
        for task, turns in prompts(arguments.benchmark, arguments.per_task).items()
    }
    lessons = answers(teacher, tasks, arguments.tokens, stop_ids_of(teacher.network, tokenizer))
    lengths = []
    print(f"{'task':16}{'length at gamma 1, 2, ...':34}greedy survival; alpha at temperature 1")
    for task in tasks:
        greedy, sampled = (
            measure(unroll, lessons[task, temperature], arguments.gamma, CPU) for temperature in (0.0, 1.0)
        )
        gains = [1 + sum(greedy.greedy[: i + 1]) for i in range(arguments.gamma)]
        lengths.append(gains)
        print(
            f"{task:16}{' '.join(f'{gain:.2f}' for gain in gains):34}"
            f"{' '.join(f'{share:.3f}' for share in greedy.greedy)}; {' '.join(f'{a:.3f}' for a in sampled.alpha)}",
            flush=True,
        )
    medians = [median(task[i] for task in lengths) for i in range(arguments.gamma)]
    print(f"{'median':16}{' '.join(f'{gain:.2f}' for gain in medians)}")


if __name__ == "__main__":
    main()
