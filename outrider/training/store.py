"""Lessons on disk: one shard for each batch of answers, whole or not there at all."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.training.prompts import Library, Prompt
from outrider.training.teacher import Lesson


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
