"""Shards of lessons: the target's own answers, one file per batch, so that an interrupted run goes on where it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from outrider.training.flight import Asked
from outrider.training.prompts import IMAGINED, Prompt, Prompts
from outrider.training.store import ShardInfo, Store
from outrider.training.teacher import Teacher

# Half the answers are as greedy decoding gives them or nearly so; the rest teach what sampling meets.
TEMPERATURES = (0.0, 0.0, 0.7, 1.0, 1.0)
MAX_PROMPT_TOKENS = 1024
_SHORTEST_TURN = 8
_IMAGINING = 500_003  # apart from the seeds of the answers


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """How answers are made.

    Attributes:
        seed: Of prompts and draws.
        batch: Prompts per shard.
        max_tokens: Longest answer.
        imagined_tokens: Longest user's turn that the target imagines.
    """

    seed: int = 0
    batch: int = 96
    max_tokens: int = 256
    imagined_tokens: int = 128


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
        if prompts.kind(number) == IMAGINED:
            generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + number + _IMAGINING)
            library.imagined = imagine(teacher, tokenizer, plan, generator)
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


def imagine(teacher: Teacher, tokenizer: Any, plan: GenerationPlan, generator: torch.Generator) -> list[str]:
    """Users' turns as the target would write them: what it puts behind the template's opening of one.

    Those that do not end, or are hardly a word, are left out; if hardly any is left, so are all.
    """
    mark = "\u2042"
    template = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    opening = tokenizer(template.split(mark)[0], add_special_tokens=False)["input_ids"]
    if not opening:
        return []
    stops = stop_ids_of(teacher.network, tokenizer)
    asked = [Asked(opening, 1.0)] * plan.batch
    turns = teacher.answer(asked, max_tokens=plan.imagined_tokens, stop_ids=stops, generator=generator)
    texts = [
        tokenizer.decode(one.ids[one.prompt_tokens :], skip_special_tokens=True).strip()
        for one in turns
        if int(one.ids[-1]) in stops
    ]
    kept = [text for text in texts if len(text) >= _SHORTEST_TURN]
    return kept if len(kept) >= plan.batch / 4 else []


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
