"""The default model as a pair of services, and the prompts that it is asked."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from tests.model import prompts
from tests.model.formats import FORMATS
from tests.service.stack import draft_service, target_service

# The bits of float32 products hold on a fixed BLAS path, which MKL reads at its first product.
os.environ.setdefault("MKL_CBWR", "AVX2")

STREAMS = 16
"""Streams decoded at the same time."""
KV_TOKENS = 32_768
"""Room for all forty prompts and their answers together."""


class Services(NamedTuple):
    """Ports of services in this process, all with the default model in one number format."""

    dtype: str
    target: int
    draft: int
    ngram: int


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=FORMATS)
async def services(request: pytest.FixtureRequest, default_model_dir: Path) -> AsyncIterator[Services]:
    """One target, the same model as a draft of its own, and an n-gram draft; loaded once per number format."""
    model, threads = str(default_model_dir), len(os.sched_getaffinity(0))
    engine = {"dtype": request.param, "threads": threads, "kv_cache_tokens": KV_TOKENS}
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(target_service(model, **engine))
        draft = await stack.enter_async_context(draft_service(model, **engine))
        ngram = await stack.enter_async_context(draft_service("ngram"))
        yield Services(request.param, target, draft, ngram)


@pytest.fixture(scope="session")
def chats(pytestconfig: pytest.Config, default_model_dir: Path) -> list[tuple[int, ...]]:
    """Ids of forty prompts from four tasks, each as the opening of a conversation."""
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in prompts.load(pytestconfig.getoption("prompts"))
    ]
    return [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in rendered]
