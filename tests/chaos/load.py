"""Clients that keep asking: every answer is compared with what the target alone wrote, and every end is sorted."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

DEADLINE_S = 240.0
"""`X-Request-Timeout` of every request; above what a target takes to start on a loaded machine."""
_SLACK_S = 10.0
"""An answer that ends later than this behind its deadline hangs."""
_RETRY_S = 0.3

OK, WRONG, HANG = "ok", "wrong", "hang"
REFUSED, UNAVAILABLE, ERROR = "refused (429)", "unavailable (503)", "error frame"
CUT, UNREACHABLE, BARE = "cut", "unreachable", "error without a body"
"""Ends of an attempt. CUT: the connection ended before the answer; BARE: an error status without our error object."""


class Text(NamedTuple):
    """What an answer said."""

    text: str
    reason: str


@dataclass(frozen=True)
class Question:
    """A request body and the answer of the target alone."""

    body: dict[str, Any]
    expected: Text | None = None


class Attempt(NamedTuple):
    """One try; times are monotonic seconds."""

    request: int
    began_s: float
    ended_s: float
    end: str
    detail: str


def questions(number: int, seed: int, tokens: tuple[int, int]) -> list[Question]:
    """Greedy and seeded requests, streamed and whole, with fixed and automatic gamma, some with a penalty."""
    dice, made = random.Random(seed), []
    for index in range(number):
        prompt = "".join(chr(dice.randrange(97, 123)) for _ in range(dice.randrange(1, 80)))
        body: dict[str, Any] = {"model": "chaos", "prompt": prompt, "max_tokens": dice.randint(*tokens)}
        body |= {"ignore_eos": True, "stream": index % 4 != 3, "temperature": 0.0}
        if index % 2:
            body |= {"temperature": 1.0, "seed": dice.randrange(1 << 30)}
        if index % 6 == 5:
            body |= {"presence_penalty": 0.5, "top_p": 0.9}
        gamma = (4, 2, None)[index % 3]
        if gamma is not None:
            body["speculative"] = {"enabled": True, "num_speculative_tokens": gamma}
        made.append(Question(body))
    return made


async def answered_alone(http: httpx.AsyncClient, url: str, asked: list[Question]) -> list[Question]:
    """The questions with their answers: one after the other, without speculation."""
    found = []
    for question in asked:
        body = {**question.body, "speculative": {"enabled": False}, "stream": False}
        response = await http.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        found.append(Question(question.body, Text(choice["text"], choice["finish_reason"])))
    return found


@dataclass
class Load:
    """Clients at work.

    Attributes:
        urls: of the doors to try in turn; the next one whenever one does not answer.
        attempts: all that have ended.
        finished: requests with the right answer.
    """

    http: httpx.AsyncClient
    urls: Callable[[], list[str]]
    asked: list[Question]
    seed: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    finished: int = 0
    _number: int = 0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, clients: int) -> None:
        self._tasks += [asyncio.create_task(self._client(index)) for index in range(clients)]

    async def stop(self) -> None:
        """Lets what runs end."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def burst(self, number: int) -> list[Attempt]:
        """So many at once, each tried once; the one with the shortest answer, for they wait for one another."""
        shortest = min(self.asked, key=lambda question: int(question.body.get("max_tokens", 0)))
        tries = [self._try(self._next(), shortest, self.urls()[0]) for _ in range(number)]
        return list(await asyncio.gather(*tries))

    async def _client(self, index: int) -> None:
        dice = random.Random(self.seed * 1_000 + index)
        while not self._stop.is_set():
            request, question, end = self._next(), dice.choice(self.asked), ""
            first = dice.randrange(1 << 16)
            while end not in (OK, WRONG, HANG):
                urls = self.urls()
                attempt = await self._try(request, question, urls[first % len(urls)])
                self.attempts.append(attempt)
                end, first = attempt.end, first + 1
                if end != OK:
                    await asyncio.sleep(_RETRY_S)
            self.finished += end == OK

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _try(self, request: int, question: Question, url: str) -> Attempt:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S + _SLACK_S):
                end, detail = await self._ask(question, f"{url}/v1/completions")
        except TimeoutError:
            end, detail = HANG, f"{question.body}"
        except httpx.ConnectError as error:
            end, detail = UNREACHABLE, repr(error)
        except httpx.HTTPError as error:
            end, detail = CUT, repr(error)
        return Attempt(request, began_s, time.monotonic(), end, detail)

    async def _ask(self, question: Question, url: str) -> tuple[str, str]:
        headers = {"X-Request-Timeout": str(DEADLINE_S)}
        async with self.http.stream("POST", url, json=question.body, headers=headers, timeout=None) as response:
            if response.status_code != 200:
                return _refusal(response.status_code, await response.aread(), response.headers)
            if not question.body["stream"]:
                choice = json.loads(await response.aread())["choices"][0]
                return _compared(question, Text(choice["text"], choice["finish_reason"]))
            text, reason, done = "", "", False
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    frame = json.loads(line.removeprefix("data: "))
                    if "error" in frame:
                        return ERROR, frame["error"]["message"]
                    text += frame["choices"][0]["text"]
                    reason = frame["choices"][0]["finish_reason"] or reason
            return _compared(question, Text(text, reason)) if done and reason else (CUT, "the stream ended early")


def _refusal(status: int, body: bytes, headers: httpx.Headers) -> tuple[str, str]:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return BARE, f"{status} {body[:200]!r}"
    if status in (429, 503) and "retry-after" not in headers:
        return BARE, f"{status} without Retry-After: {message}"
    return {429: REFUSED, 503: UNAVAILABLE}.get(status, ERROR), message


def _compared(question: Question, got: Text) -> tuple[str, str]:
    if got == question.expected:
        return OK, ""
    return WRONG, f"{question.body}: {got} instead of {question.expected}"
