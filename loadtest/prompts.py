"""Prompts, from the formats that people have them in, and a pool that never hands out the same text twice."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from outrider.errors import InvalidArgument

Format = Literal["auto", "builtin", "jsonl", "sharegpt", "text", "random"]
BUILT_IN = Path(__file__).with_name("prompts.jsonl")
CHAT_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Spec-Bench lists the categories of MT-bench one by one; together they are its multi-turn chat task."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to be answered; `output_tokens` is the length of its answer where the data set states one."""

    text: str
    task: str
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts and where they come from.

    Attributes:
        random: whether the texts are meaningless, so that acceptance says nothing about real use.
    """

    name: str
    prompts: tuple[Prompt, ...]
    random: bool = False


def load(name: Format, path: Path | None, *, random_words: int = 64, seed: int = 0) -> PromptSet:
    """Read a prompt set.

    Args:
        name: `builtin` (40 prompts of four tasks), `jsonl` (lines with `prompt`, `turns` or `messages`; Spec-Bench is
            one), `sharegpt` (a JSON list with `conversations`), `text` (a prompt per line), `random` (words of random
            letters), or `auto`: by the file's name, built-in without a file.
        path: the file.
        random_words: length of a random prompt.

    Raises:
        InvalidArgument: no file where one is needed, or one without prompts; the message names the line.
    """
    if name == "auto":
        name = "builtin" if path is None else {".jsonl": "jsonl", ".json": "sharegpt"}.get(path.suffix, "text")  # type: ignore[assignment]
    if name == "random":
        return PromptSet(f"random ({random_words} words)", tuple(_random(random_words, seed)), random=True)
    if name == "builtin":
        return PromptSet("builtin", tuple(_jsonl(BUILT_IN)))
    if path is None:
        raise InvalidArgument("dataset-path", f"data set {name} needs a file")
    if not path.is_file():
        raise InvalidArgument("dataset-path", f"{path} is not a file")
    prompts = {"jsonl": _jsonl, "sharegpt": _sharegpt, "text": _text}[name](path)
    if not prompts:
        raise InvalidArgument("dataset-path", f"{path} holds no prompt")
    return PromptSet(path.name, tuple(prompts))


def _jsonl(path: Path) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = _first(row)
        except (json.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError):
            raise InvalidArgument(
                "dataset-path", f"{path.name} line {number} has no prompt, turns or messages"
            ) from None
        task = str(row.get("task") or row.get("category") or "all")
        length = row.get("output_tokens", row.get("output_len"))
        prompts.append(
            Prompt(text, "chat" if task in CHAT_CATEGORIES else task, None if length is None else int(length))
        )
    return prompts


def _first(row: dict[str, Any]) -> str:
    if "prompt" in row:
        return str(row["prompt"])
    if "turns" in row:
        return str(row["turns"][0])
    return str(next(message["content"] for message in row["messages"] if message["role"] == "user"))


def _sharegpt(path: Path) -> list[Prompt]:
    try:
        rows = json.loads(path.read_text("utf-8"))
        turns = [row["conversations"] for row in rows if row.get("conversations")]
        return [Prompt(str(first[0]["value"]), "sharegpt") for first in turns if str(first[0]["value"]).strip()]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise InvalidArgument("dataset-path", f"{path.name} is no JSON list of objects with `conversations`") from None


def _text(path: Path) -> list[Prompt]:
    return [Prompt(line, "text") for line in path.read_text("utf-8").splitlines() if line.strip()]


def _random(words: int, seed: int, count: int = 1000) -> list[Prompt]:
    rng = random.Random(seed)
    letters = string.ascii_lowercase
    return [
        Prompt(" ".join("".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(words)), "random")
        for _ in range(count)
    ]


class PromptPool:
    """Hands out prompts in shuffled order. A text that was handed out before gets a number in front of it.

    So a cache of prefixes (the server's, the draft's) cannot make a later cell of a sweep look faster, and yet two arms
    can be given the same questions.

    Attributes:
        numbered: prompts that had to be numbered so far.
    """

    def __init__(self, source: PromptSet, *, seed: int, allow_repeat: bool = False) -> None:
        self.source = source
        self.numbered = 0
        self._allow_repeat = allow_repeat
        self._order = list(source.prompts)
        random.Random(seed).shuffle(self._order)
        self._next = 0
        self._seen: set[str] = set()

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, around the set as often as it takes."""
        chosen = [self._order[(self._next + index) % len(self._order)] for index in range(count)]
        self._next += count
        return chosen

    def filler(self, rng: random.Random) -> list[Prompt]:
        """Prompts in an order of their own, as text that stands before a question."""
        return rng.sample(self._order, len(self._order))

    def fresh(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """These prompts as texts that were never sent before."""
        return [self._fresh(prompt) for prompt in prompts]

    def _fresh(self, prompt: Prompt) -> Prompt:
        if self._allow_repeat:
            return prompt
        if prompt.text in self._seen:
            self.numbered += 1
            prompt = replace(prompt, text=f"({self.numbered:05d}) {prompt.text}")
        self._seen.add(prompt.text)
        return prompt


def lengthened(prompt: Prompt, filler: Sequence[Prompt], characters: int) -> Prompt:
    """The prompt behind a passage of other prompts' text, `characters` long altogether.

    A prompt that is longer already is cut at its front, since the question stands at the end.
    """
    if len(prompt.text) >= characters:
        return replace(prompt, text=prompt.text[-characters:])
    passage = ""
    for other in filler:
        if len(passage) + len(prompt.text) + 2 >= characters:
            break
        passage += other.text + "\n"
    room = characters - len(prompt.text) - 2
    while len(passage) < room:
        passage += passage or "The quick brown fox jumps over the lazy dog.\n"
    return replace(prompt, text=f"{passage[:room]}\n\n{prompt.text}")
