"""Checks that no benchmark prompt, nor a near-duplicate, was trained on.

    python tools/check_training_prompts.py WORK_FOLDER BENCHMARK.jsonl

WORK_FOLDER is what `outrider train-draft --work` was given; BENCHMARK has `turns` on each line. Texts are compared as
lower-case words. A turn counts as trained on when a prompt or an answer of the training data

- shares 13 words in a row with it, or
- contains the whole of it (turns of five to twelve words), or
- has at least 80 % of its words in common (training turns of five words or more, Jaccard).

Exit code 1 and a line for each such turn, else 0.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import safe_open

GRAM = 13
SHORTEST = 5
ALIKE = 0.8

Words = tuple[str, ...]


def words(text: str) -> Words:
    """Lower-case words and numbers, without punctuation."""
    return tuple(re.findall(r"\w+", text.lower()))


def grams(text: Words, size: int) -> Iterator[Words]:
    """Every run of `size` words."""
    return (text[i : i + size] for i in range(len(text) - size + 1))


def trained_texts(folder: Path) -> tuple[set[str], set[str]]:
    """The distinct user turns, and the distinct other texts (answers, own and quoted), of all shards."""
    asked: set[str] = set()
    answered: set[str] = set()
    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(path, "pt") as file:
            conversations = json.loads(file.metadata()["conversations"])
        for entry in conversations:
            answered.add(entry["answer"])
            for message in entry["messages"]:
                (asked if message["role"] == "user" else answered).add(message["content"])
    return asked, answered


def duplicates(turns: Iterable[str], asked: set[str], answered: set[str]) -> Iterator[tuple[str, str]]:
    """Benchmark turns that were trained on, each with why."""
    asked_words = [words(text) for text in asked]
    trained = asked_words + [words(text) for text in answered]
    by_size = {size: {gram for text in trained for gram in grams(text, size)} for size in range(SHORTEST, GRAM + 1)}
    bags = [frozenset(text) for text in asked_words if len(text) >= SHORTEST]
    for turn in turns:
        own = words(turn)
        size = min(GRAM, len(own))
        if size < SHORTEST:
            continue
        if shared := next((gram for gram in grams(own, size) if gram in by_size[size]), None):
            yield turn, f"shares {' '.join(shared)!r}"
            continue
        bag = frozenset(own)
        if any(len(bag & other) >= ALIKE * len(bag | other) for other in bags):
            yield turn, f"has {ALIKE:.0%} of its words in common with a training prompt"


def main(folder: Path, benchmark: Path) -> int:
    """Prints what is found; the exit code."""
    asked, answered = trained_texts(folder)
    turns = [turn for line in benchmark.read_text(encoding="utf-8").splitlines() for turn in json.loads(line)["turns"]]
    found = list(duplicates(turns, asked, answered))
    for turn, why in found:
        print(f"{turn[:100]!r} {why}")
    print(f"{len(turns)} turns against {len(asked)} training prompts and {len(answered)} answers: {len(found)} found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
