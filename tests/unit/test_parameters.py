"""Each request parameter through the HTTP door: text, ids and log-probabilities with and without speculation."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from coordinator.app import build_app
from coordinator.frames import Writer
from coordinator.front import Front, FrontConfig
from outrider.engine.config import EngineConfig
from outrider.engine.laws import printable_table
from outrider.engine.model import load_model
from outrider.seam import VerdictBatch
from tests.unit.pure_pair import PurePair
from tests.unit.tiny import tiny_llama

PROMPT = "Hello"
GREEDY = {"temperature": 0}
COUPLED = {"temperature": 1, "seed": 5}
MODES = {"greedy": GREEDY, "coupled": COUPLED}
OFF = {"speculative": {"enabled": False}}

PARAMETERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "logprobs": {"logprobs": 5},
    "logprobs of the token alone": {"logprobs": 0},
    "logprobs as ids": {"logprobs": 3, "return_tokens_as_token_ids": True},
    "echo": {"echo": True, "logprobs": 2, "n": 2},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "bad_words": {"bad_words": ["bcd", "JK", "xy"]},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "logprobs": 3},
    "logit_bias": {"logit_bias": {"99": -100, "65": 3.5}, "logprobs": 3},
    "allowed_token_ids": {"allowed_token_ids": [*range(70, 122)], "logprobs": 3},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": [113, 114, 115]},
    "stop_token_ids": {"stop_token_ids": [122, 64]},
    "stop": {"stop": ["tuv", "cde", "~ "], "logprobs": 1},
    "stop, shown": {"stop": ["tuv", "cde"], "include_stop_str_in_output": True},
    "top_k": {"top_k": 2, "logprobs": 4},
    "top_p": {"top_p": 0.85},
    "min_p": {"min_p": 0.05},
    "temperature": {"temperature": 1.7, "seed": 5, "logprobs": 2},
    "n": {"n": 3, "logprobs": 1},
    "several prompts": {"prompt": ["Hello", "You", "A"], "n": 2, "logprobs": 1},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
    "add_special_tokens": {"add_special_tokens": False, "echo": True},
    "cache_salt": {"cache_salt": "mine"},
}


@asynccontextmanager
async def client_of(pair: PurePair, config: FrontConfig | None = None) -> AsyncIterator[httpx.AsyncClient]:
    front = Front(pair, config or FrontConfig(max_speculative_tokens=8))
    await front.start()
    while front.readiness.reason:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    transport = httpx.ASGITransport(build_app(lambda: front))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            yield client
    finally:
        await front.close()


async def ask(client: httpx.AsyncClient, path: str = "completions", **fields: Any) -> dict[str, Any]:
    body = {"max_tokens": 24, "return_token_ids": True, **fields}
    response = await client.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


async def streamed(client: httpx.AsyncClient, path: str = "completions", **fields: Any) -> list[dict[str, Any]]:
    body = {"max_tokens": 24, "return_token_ids": True, "stream": True, **fields}
    response = await client.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def what_is_said(body: dict[str, Any]) -> Any:
    """All that must not depend on speculation."""
    return [{**choice, "drafted": None} for choice in body["choices"]], body["usage"]


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream as those of a whole answer."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices.setdefault(part["index"], {**part, "text": "", "token_ids": [], "logprobs": None})
            whole["text"] += part["text"]
            whole["token_ids"] = [*whole["token_ids"], *part["token_ids"]]
            whole |= {"finish_reason": part["finish_reason"], "stop_reason": part["stop_reason"], "drafted": None}
            if part["logprobs"] is not None:
                before = whole["logprobs"] or dict.fromkeys(part["logprobs"], ())
                whole["logprobs"] = {name: [*before[name], *part["logprobs"][name]] for name in before}
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize(
    ("name", "mode", "draft"),
    [(name, mode, "stub:perfect") for name in PARAMETERS for mode in ("greedy", "coupled")]
    + [(name, "coupled", "stub:accept?p=0.6") for name in ("logprobs", "bad_words", "penalties", "stop")],
)
async def test_a_parameter_gives_the_same_answer_with_speculation_on_and_off(name: str, mode: str, draft: str) -> None:
    """Guards every parameter at every slot: text, ids, log-probabilities, usage and reasons, and streams the same."""
    fields = {"prompt": PROMPT, "max_tokens": 16, **MODES[mode], **PARAMETERS[name]}
    pair = PurePair(draft=draft)
    async with client_of(pair) as client:
        plain = what_is_said(await ask(client, **fields, **OFF))
        assert not pair.rounds
        assert what_is_said(await ask(client, **fields)) == plain
        assert pair.rounds and max(pair.rounds) > 1
        choices, usage = plain
        assert sum(len(choice["token_ids"]) for choice in choices) == usage["completion_tokens"]
        for choice in choices:
            prompt = len(choice["prompt_token_ids"]) if fields.get("echo") else 0
            if choice["logprobs"] is not None:
                assert {len(column) for column in choice["logprobs"].values()} == {prompt + len(choice["token_ids"])}
        if mode == "coupled" and "prompt_logprobs" not in fields:
            stream = joined(await streamed(client, **fields))
            assert [(c["text"], c["token_ids"], c["logprobs"], c["finish_reason"]) for c in stream] == [
                (c["text"], c["token_ids"], c["logprobs"], c["finish_reason"]) for c in plain[0]
            ]


async def test_a_model_s_logprobs_are_the_same_bits_with_speculation_on_and_off(tmp_path: Path) -> None:
    """Guards values and alternatives against the shape of the pass that they come from, in bfloat16 with its ties."""
    folder = tiny_llama(tmp_path, vocab=258, dtype=torch.bfloat16, scale=4.0)
    model = load_model(EngineConfig(model=str(folder), dtype="bfloat16", kv_cache_tokens=8192, threads=1))
    model.allocate_kv(model.num_blocks)
    assert model.info.invariant, model.info.invariance_note
    fields = {"prompt": "The quick fox", "logprobs": 20, "echo": True, "frequency_penalty": 0.5, "ignore_eos": True}
    for mode in (GREEDY, COUPLED):
        async with client_of(PurePair(model)) as client:
            plain = what_is_said(await ask(client, **fields, **mode, **OFF))
        script = ",".join(map(str, plain[0][0]["token_ids"]))
        pair = PurePair(model, f"stub:accept?tokens={script}&p=0.8")
        async with client_of(pair) as client:
            assert what_is_said(await ask(client, **fields, **mode)) == plain
        assert max(pair.rounds) == 4 and min(pair.rounds) < 4


@pytest.mark.parametrize("mode", [GREEDY, COUPLED, {"temperature": 1}], ids=["greedy", "coupled", "standard"])
@pytest.mark.parametrize("draft", ["stub:perfect", "stub:accept?k=2", "stub:wrong"])
async def test_logprobs_are_those_of_the_raw_logits(mode: dict[str, Any], draft: str) -> None:
    """Guards the row of each token, accepted, recovered or bonus, against parameters and against its neighbours."""
    table = torch.log_softmax(torch.from_numpy(np.maximum(np.log(printable_table() + 1e-300), -1e9)).float(), -1)
    pair = PurePair(draft=draft)
    async with client_of(pair) as client:
        body = await ask(
            client, prompt=PROMPT, logprobs=3, frequency_penalty=0.7, logit_bias={"100": 5}, top_p=0.9, **mode
        )
    (choice,) = body["choices"]
    tokens = [*PROMPT.encode(), *choice["token_ids"]]
    assert pair.rounds
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) == 24
    for index, token in enumerate(choice["token_ids"]):
        row = table[tokens[len(PROMPT) + index - 1]]
        assert choice["logprobs"]["token_logprobs"][index] == pytest.approx(float(row[token]), abs=1e-5)
        tops = choice["logprobs"]["top_logprobs"][index]
        order = sorted(range(258), key=lambda other: (-float(row[other]), other))[:3]
        assert list(tops)[:3] == [chr(other) for other in order]
        assert set(tops) == {chr(other) for other in [*order, token]}


async def test_logprobs_off_by_one_row_are_seen() -> None:
    """The planted error: each value taken from the row behind its token's own."""

    def shifted(batch: VerdictBatch) -> VerdictBatch:
        own = np.roll(batch.logprobs.own, -1)
        return replace(batch, logprobs=replace(batch.logprobs, own=own)) if len(batch.logprobs) else batch

    pair = PurePair(draft="stub:accept?p=0.6")
    async with client_of(pair) as client:
        fields = {"prompt": PROMPT, **COUPLED, "logprobs": 2}
        plain = what_is_said(await ask(client, **fields, **OFF))
        pair.tamper = shifted
        assert what_is_said(await ask(client, **fields)) != plain


async def test_an_echo_scores_the_prompt() -> None:
    """Guards what evaluation harnesses read: each prompt token under those before it, the first one without."""
    table = np.log(printable_table() + 1e-300)
    pair = PurePair()
    async with client_of(pair) as client:
        for max_tokens in (0, 1):
            body = await ask(
                client, prompt=[[65, 66, 67, 70], [97]], echo=True, logprobs=1, max_tokens=max_tokens, **GREEDY
            )
            first, second = body["choices"]
            assert first["text"].startswith("ABCF") and len(first["text"]) == 4 + max_tokens
            assert first["logprobs"]["tokens"][:4] == ["A", "B", "C", "F"]
            assert first["logprobs"]["text_offset"] == [*range(4 + max_tokens)]
            values = first["logprobs"]["token_logprobs"]
            assert values[0] is None and first["logprobs"]["top_logprobs"][0] is None
            expected = [table[65, 66], table[66, 67], table[67, 70]]
            assert values[1:4] == pytest.approx(expected, abs=1e-5)
            assert first["logprobs"]["top_logprobs"][3].keys() == {"D", "F"}
            assert len(values) == 4 + max_tokens
            assert second["logprobs"]["token_logprobs"][:1] == [None]
            assert second["text"] == ("a" if not max_tokens else "ab")
            assert body["usage"] == {
                "prompt_tokens": 5,
                "completion_tokens": 2 * max_tokens,
                "total_tokens": 5 + 2 * max_tokens,
            }
            assert (first["finish_reason"], first["token_ids"]) == ("length", [71][:max_tokens])


async def test_a_long_prompt_is_scored_over_many_steps() -> None:
    """Guards against prompts read in pieces, of which only the last one had logits."""
    prompt = [65 + index % 26 for index in range(1500)]
    table = np.log(printable_table() + 1e-300)
    pair = PurePair()
    async with client_of(pair) as client:
        body = await ask(client, prompt=prompt, prompt_logprobs=0, max_tokens=1, **GREEDY)
        entries = body["choices"][0]["prompt_logprobs"]
        assert len(pair.target.steps) > 5
    assert entries[0] is None
    assert [
        entry[str(token)]["logprob"] for entry, token in zip(entries[1:], prompt[1:], strict=True)
    ] == pytest.approx([table[before, token] for before, token in pairwise(prompt)], abs=1e-4)


async def test_a_chat_has_an_entry_per_token() -> None:
    """Guards OpenAI's other form, whole and streamed: bytes, and exactly the alternatives that were asked for."""
    pair = PurePair()
    fields = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, **COUPLED}
    async with client_of(pair) as client:
        whole = (await ask(client, "chat/completions", **fields))["choices"][0]
        chunks = await streamed(client, "chat/completions", **fields)
    content = whole["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == whole["message"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]) == whole["message"]["content"].encode()
    assert {len(entry["top_logprobs"]) for entry in content} == {2}
    parts = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks]
    assert [entry for part in parts for entry in part] == content
    assert any(len(part) > 1 for part in parts)


async def test_logprobs_need_no_top_and_leave_out_nothing() -> None:
    """Guards chats with `logprobs` alone."""
    async with client_of(PurePair()) as client:
        body = await ask(client, "chat/completions", messages=[{"role": "user", "content": "hi"}], logprobs=True)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 24
    assert all(entry["top_logprobs"] == [] and math.isfinite(entry["logprob"]) for entry in content)


@pytest.mark.parametrize("mode", [GREEDY, COUPLED, {"temperature": 1}], ids=["greedy", "coupled", "standard"])
async def test_a_bad_word_is_never_completed(mode: dict[str, Any]) -> None:
    """Guards multi-token words at every slot, those that begin in the prompt and those behind a space included."""
    words = ["bcd", "JK", "fg", " !", "~"]
    pair = PurePair()
    async with client_of(pair) as client:
        free = (await ask(client, prompt=PROMPT, max_tokens=100, **mode))["choices"][0]["text"]
        body = await ask(client, prompt="abc", max_tokens=100, bad_words=words, **mode)
    assert pair.rounds
    assert any(word in free for word in words)
    text = "abc" + body["choices"][0]["text"]
    assert [word for word in words if word in text] == []


async def test_choices_of_several_prompts_are_those_of_each_alone() -> None:
    """Guards the order prompt x n + i, and the seed of each answer."""
    async with client_of(PurePair()) as client:
        both = await ask(client, prompt=["Hello", "You"], n=2, **COUPLED)
        alone = [(await ask(client, prompt=prompt, n=2, **COUPLED))["choices"] for prompt in ("Hello", "You")]
    texts = [choice["text"] for choice in both["choices"]]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert texts == [choice["text"] for choices in alone for choice in choices]
    assert len(set(texts)) == 4
    assert both["usage"]["prompt_tokens"] == 6 + 4


async def test_a_prompt_that_was_seen_before_is_found_by_its_own_tenant_only() -> None:
    """Guards usage, and the wall between tenants: whoever finds a prefix learns that somebody had it."""
    prompt = "A prompt of some length, so that it fills several blocks of the cache."
    async with client_of(PurePair()) as client:

        async def cached(key: str | None = None, **fields: Any) -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            body = {"prompt": prompt, "max_tokens": 4, **GREEDY, **fields}
            usage = (await client.post("/v1/completions", json=body, headers=headers)).json()["usage"]
            assert usage["prompt_tokens"] == 1 + len(prompt)
            return usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)  # type: ignore[no-any-return]

        assert [await cached(), await cached()] == [0, 64]
        assert [await cached("one"), await cached("two"), await cached("one")] == [0, 0, 64]
        assert [await cached(cache_salt="a"), await cached("one", cache_salt="a"), await cached(cache_salt="a")] == [
            0,
            0,
            64,
        ]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_prompts_are_written_off_the_event_loop(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards all other answers: those of a long prompt take seconds to write."""
    threads: dict[str, set[int]] = {"whole": set(), "chunk": set()}
    for name, seen in threads.items():
        own = getattr(Writer, name)

        def noted(self: Writer, *arguments: Any, own: Any = own, seen: set[int] = seen) -> Any:
            seen.add(threading.get_ident())
            return own(self, *arguments)

        monkeypatch.setattr(Writer, name, noted)
    async with client_of(PurePair()) as client:
        # Of a stream one round's are few; a whole answer's may be as many as a prompt's.
        for fields, off_loop in (({}, False), ({"logprobs": 1}, not stream), ({"echo": True, "logprobs": 1}, True)):
            for seen in threads.values():
                seen.clear()
            asking = streamed if stream else ask
            await asking(client, prompt=PROMPT, **fields, **GREEDY)
            assert bool(threads["chunk" if stream else "whole"] - {threading.get_ident()}) == off_loop
