"""Shards of lessons: the target's own answers, one file per batch, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.training.prompts import Library, Prompt, Prompts
from outrider.training.teacher import Asked, Lesson, Teacher

# Half the answers are as greedy decoding gives them or nearly so; the rest teach what sampling meets.
TEMPERATURES = (0.0, 0.0, 0.7, 1.0, 1.0)
MAX_PROMPT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """How answers are made.

    Attributes:
        seed: Of prompts and draws.
        batch: Prompts per shard.
        max_tokens: Longest answer.
    """

    seed: int = 0
    batch: int = 96
    max_tokens: int = 256


class ShardInfo(NamedTuple):
    """What a shard holds: its number, kind, answers, and the tokens in them."""

    number: int
    kind: str
    answers: int
    tokens: int


class Store:
    """The folder with the shards."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def shards(self) -> list[Path]:
        """Finished shards, in order of their numbers."""
        return sorted(self.folder.glob("shard-?????.safetensors"))

    def info(self, path: Path) -> ShardInfo:
        """What is known of a shard without reading its tensors."""
        with safe_open(path, "pt") as file:
            known = file.metadata()
        return ShardInfo(int(known["number"]), known["kind"], int(known["answers"]), int(known["tokens"]))

    def write(
        self, number: int, prompts: Sequence[Prompt], lessons: Sequence[Lesson], texts: Sequence[str]
    ) -> ShardInfo:
        """Adds a shard; it appears whole or not at all."""
        info = ShardInfo(number, prompts[0].kind, len(lessons), sum(len(one.top_ids) for one in lessons))
        rows = torch.tensor([[len(one.ids), one.prompt_tokens, one.start] for one in lessons], dtype=torch.int32)
        tensors = {
            "rows": rows,
            "ids": torch.cat([one.ids for one in lessons]),
            "features": torch.cat([one.features for one in lessons]),
            "top_ids": torch.cat([one.top_ids for one in lessons]),
            "top_probs": torch.cat([one.top_probs for one in lessons]),
        }
        conversations = [{"messages": p.messages, "answer": t} for p, t in zip(prompts, texts, strict=True)]
        metadata = {
            "number": str(number),
            "kind": info.kind,
            "answers": str(info.answers),
            "tokens": str(info.tokens),
            "conversations": json.dumps(conversations),
        }
        path = self.folder / f"shard-{number:05d}.safetensors"
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata=metadata)
        os.replace(partial, path)
        return info

    def read(self, path: Path) -> list[Lesson]:
        """The lessons of a shard."""
        with safe_open(path, "pt") as file:
            t: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
        lessons = []
        token = feature = answer = 0
        for tokens, prompt, start in t["rows"].tolist():
            n, m = tokens - start, tokens - prompt
            lessons.append(
                Lesson(
                    t["ids"][token : token + tokens],
                    prompt,
                    start,
                    t["features"][feature : feature + n],
                    t["top_ids"][answer : answer + m],
                    t["top_probs"][answer : answer + m],
                )
            )
            token, feature, answer = token + tokens, feature + n, answer + m
        return lessons

    def library(self) -> Library:
        """What later prompts may build on, from the shards so far."""
        library = Library()
        for path in self.shards():
            with safe_open(path, "pt") as file:
                known = file.metadata()
            for entry in json.loads(known["conversations"]):
                library.add(Prompt(tuple(entry["messages"]), known["kind"]), entry["answer"])
        return library


def generate(
    teacher: Teacher, tokenizer: Any, prompts: Prompts, store: Store, plan: GenerationPlan
) -> Iterator[ShardInfo]:
    """Goes on from the last shard, for as long as the caller asks for more.

    Args:
        teacher: The target.
        tokenizer: Its transformers tokenizer, with a chat template.
        prompts: What to ask.
        store: Where the shards go.
        plan: How.

    Yields:
        Each shard once it is on disk.
    """
    library = store.library()
    stop_ids = stop_ids_of(teacher.network, tokenizer)
    number = store.info(store.shards()[-1]).number + 1 if store.shards() else 0
    while True:
        batch = prompts.batch(number, plan.batch, library)
        rendered = [render(tokenizer, prompt) for prompt in batch]
        order = sorted(range(len(batch)), key=lambda i: len(rendered[i]))
        batch, rendered = [batch[i] for i in order], [rendered[i] for i in order]
        drawn = random.Random(f"{plan.seed}/temperature/{number}")
        asked = [Asked(ids, drawn.choice(TEMPERATURES)) for ids in rendered]
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + number)
        lessons = teacher.answer(asked, max_tokens=plan.max_tokens, stop_ids=stop_ids, generator=generator)
        texts = [tokenizer.decode(one.ids[one.prompt_tokens :], skip_special_tokens=True) for one in lessons]
        for prompt, text in zip(batch, texts, strict=True):
            library.add(prompt, text)
        yield store.write(number, batch, lessons, texts)
        number += 1


def render(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The prompt's ids as in serving, by the model's chat template; those of a long prompt lose their middle."""
    ids: list[int] = tokenizer.apply_chat_template(
        list(prompt.messages), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    half = MAX_PROMPT_TOKENS // 2
    return ids if len(ids) <= MAX_PROMPT_TOKENS else ids[:half] + ids[-half:]


def stop_ids_of(network: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end an answer: the generation config's, and the tokenizer's."""
    known = network.generation_config.eos_token_id
    known = known if isinstance(known, list) else [known]
    return frozenset(i for i in (*known, tokenizer.eos_token_id) if i is not None)
