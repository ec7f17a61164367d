"""Lessons on disk: one shard for each batch of answers, whole or not there at all.

Features and distributions are nearly all of a lesson's bytes. Once the shards have reached the limit, further ones hold
the ids alone, and the target's pass over an answer is run again whenever it is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
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


Recall = Callable[[Sequence[int], int], Lesson]
"""The lesson of an answer, from its ids and how many of them are the prompt."""


class Store:
    """The folder with the shards.

    Attributes:
        recall: Computes what a shard of ids alone does not hold.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        """
        Args:
            folder: Made where there is none.
            limit_bytes: Of shards with features and distributions; unset: no limit.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.recall: Recall | None = None
        self._limit_bytes = limit_bytes

    def shards(self) -> list[Path]:
        """Finished shards, in order of their numbers."""
        return sorted(self.folder.glob("shard-?????.safetensors"))

    @property
    def used_bytes(self) -> int:
        """What the shards take on disk."""
        return sum(path.stat().st_size for path in self.shards())

    def kept(self) -> list[Path]:
        """Shards that can be read without the target; all, where there is none of them."""
        shards = self.shards()
        return [path for path in shards if self._is_kept(path)] or shards

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
        tensors = {"rows": rows, "ids": torch.cat([one.ids for one in lessons])}
        computed = {
            "features": torch.cat([one.features for one in lessons]),
            "top_ids": torch.cat([one.top_ids for one in lessons]),
            "top_probs": torch.cat([one.top_probs for one in lessons]),
        }
        if self._has_room(sum(tensor.nbytes for tensor in computed.values())):
            tensors |= computed
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

    def read(self, path: Path, wanted: Callable[[int], bool] = lambda place: True) -> Iterator[Lesson]:
        """The lessons of a shard, those whose place in it is wanted.

        Raises:
            RuntimeError: it holds ids alone, and there is no `recall`.
        """
        with safe_open(path, "pt") as file:
            t: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
        token = feature = answer = 0
        for place, (tokens, prompt, start) in enumerate(t["rows"].tolist()):
            n, m = tokens - start, tokens - prompt
            if wanted(place):
                ids = t["ids"][token : token + tokens]
                if "features" not in t:
                    yield self._recalled(ids, prompt)
                else:
                    yield Lesson(
                        ids,
                        prompt,
                        start,
                        t["features"][feature : feature + n],
                        t["top_ids"][answer : answer + m],
                        t["top_probs"][answer : answer + m],
                    )
            token, feature, answer = token + tokens, feature + n, answer + m

    def _recalled(self, ids: Tensor, prompt: int) -> Lesson:
        if self.recall is None:
            raise RuntimeError("the shard holds ids alone, and there is no target to compute the rest")
        return self.recall(ids.tolist(), prompt)

    def _has_room(self, more_bytes: int) -> bool:
        return self._limit_bytes is None or self.used_bytes + more_bytes <= self._limit_bytes

    def _is_kept(self, path: Path) -> bool:
        with safe_open(path, "pt") as file:
            return "features" in file.keys()  # noqa: SIM118 (no iterator)

    def library(self) -> Library:
        """What later prompts may build on, from the shards so far."""
        library = Library()
        for path in self.shards():
            with safe_open(path, "pt") as file:
                known = file.metadata()
            for entry in json.loads(known["conversations"]):
                library.add(Prompt(tuple(entry["messages"]), known["kind"]), entry["answer"])
        return library
