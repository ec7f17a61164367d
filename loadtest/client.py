"""Sends one request to an OpenAI-compatible server and watches the answer arrive."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import aiohttp

from loadtest.outcome import Outcome, Piece
from loadtest.sse import EventParser
from outrider.errors import InvalidArgument, Unavailable

Door = Literal["completions", "chat"]
_DETAIL_CHARACTERS = 300
_SPARE_FILES = 64
"""Descriptors that the process needs beside its connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where requests go.

    Attributes:
        url: of the server, with or without `/v1`.
        model: as requests name it.
        timeout_s: for a whole answer.
        headers: sent with each request.
    """

    url: str
    door: Door
    model: str
    timeout_s: float = 600.0
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return base(self.url) + ("/v1/chat/completions" if self.door == "chat" else "/v1/completions")

    def body(self, prompt: str, *, stream: bool, each_usage: bool, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The request's JSON; `each_usage` asks for the running count of tokens with every piece."""
        body: dict[str, Any] = {"model": self.model, **fields}
        if self.door == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if stream:
            options = {"include_usage": True, **({"continuous_usage_stats": True} if each_usage else {})}
            body |= {"stream": True, "stream_options": options}
        return body


class Client:
    """An HTTP session without a limit of its own on connections; use as an async context manager."""

    def __init__(self, endpoint: Endpoint, *, connections: int) -> None:
        """
        Args:
            connections: requests that may be under way at once; descriptors are made available for them.
        """
        self.endpoint = endpoint
        self._connections = connections

    async def __aenter__(self) -> Self:
        allow_connections(self._connections)
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0)
        timeout = aiohttp.ClientTimeout(total=self.endpoint.timeout_s)
        headers = dict(self.endpoint.headers)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def text(self, path: str, timeout_s: float = 10.0) -> str | None:
        """Body of a GET below the server's root; None where it is not 200 or there is no answer."""
        try:
            async with asyncio.timeout(timeout_s), self._session.get(base(self.endpoint.url) + path) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def send(
        self,
        body: Mapping[str, Any],
        *,
        task: str,
        planned_s: float,
        clock: Callable[[], float],
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Outcome:
        """One request, to its end. Failures are outcomes, never exceptions."""
        answer = _Answer(task, planned_s, clock, on_piece)
        try:
            async with self._session.post(self.endpoint.path, json=body) as response:
                if response.status != 200:
                    return answer.failed(f"http_{response.status}", _message(await response.text(errors="replace")))
                if not body.get("stream"):
                    answer.whole(await response.text())
                else:
                    await _read(response, answer)
        except aiohttp.ClientConnectorError as error:
            return answer.failed("connect", str(error))
        except TimeoutError:
            return answer.failed("timeout", f"no end within {self.endpoint.timeout_s:g} s")
        except (aiohttp.ClientError, ConnectionError) as error:
            return answer.failed("cut", f"{type(error).__name__}: {error}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return answer.failed("malformed", f"{type(error).__name__}: {error}")
        return answer.ended()


async def _read(response: aiohttp.ClientResponse, answer: _Answer) -> None:
    parser = EventParser()
    async for data in response.content.iter_any():
        for event in parser.feed(data):
            answer.take(event)
    for event in parser.finish():
        answer.take(event)


class _Answer:
    """Takes the events of one stream."""

    def __init__(
        self, task: str, planned_s: float, clock: Callable[[], float], on_piece: Callable[[Piece], None] | None
    ) -> None:
        self._task = task
        self._planned_s = planned_s
        self._clock = clock
        self._on_piece = on_piece
        self._sent_s = clock()
        self._pieces: list[Piece] = []
        self._usage: Mapping[str, Any] | None = None
        self._speculation: Mapping[str, Any] = {}
        self._streamed = True
        self._said_something = False
        self._finished = False
        self._error: str | None = None

    def take(self, data: str) -> None:
        if data == "[DONE]":
            self._finished = True
            return
        event = json.loads(data)
        if event.get("error"):
            self._error = _said(event["error"])
            return
        usage = event.get("usage")
        if usage:
            self._usage = usage  # running totals: the last one counts, they are never added up
        self._speculation = (event.get("metrics") or {}).get("speculative_decoding") or self._speculation
        for choice in event.get("choices") or ():
            self._finished = self._finished or choice.get("finish_reason") is not None
            if _text(choice):
                self._said_something = True
                piece = Piece(self._clock(), usage["completion_tokens"] if usage else None)
                self._pieces.append(piece)
                if self._on_piece:
                    self._on_piece(piece)

    def whole(self, text: str) -> None:
        """An answer that did not stream."""
        body = json.loads(text)
        self._streamed = False
        self._finished = True
        self._usage = body.get("usage")
        self._speculation = (body.get("metrics") or {}).get("speculative_decoding") or {}
        self._said_something = any(_text(choice) for choice in body["choices"])

    def ended(self) -> Outcome:
        """The outcome of a stream that ended by itself."""
        if self._error is not None:
            return self.failed("error_event", self._error)
        if not self._finished:
            return self.failed("cut", "the stream ended without a finish reason or [DONE]")
        if not self._said_something:
            return self.failed("empty", "the answer has no text")
        if self._usage is None:
            return self.failed("no_usage", "the server does not count tokens (stream_options.include_usage)")
        if not self._usage.get("completion_tokens"):
            return self.failed("empty", "the answer has no tokens")
        return self._outcome(None, "")

    def failed(self, failure: str, detail: str) -> Outcome:
        return self._outcome(failure, detail[:_DETAIL_CHARACTERS])

    def _outcome(self, failure: str | None, detail: str) -> Outcome:
        usage = self._usage or {}
        return Outcome(
            task=self._task,
            planned_s=self._planned_s,
            sent_s=self._sent_s,
            first_s=self._pieces[0].at_s if self._pieces and self._streamed else None,
            end_s=self._clock(),
            pieces=tuple(self._pieces),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            output_tokens=int(usage.get("completion_tokens") or 0),
            speculation=self._speculation,
            failure=failure,
            detail=detail,
        )


def _text(choice: Mapping[str, Any]) -> bool:
    """Whether the choice brings text; the empty role chunk of a chat does not."""
    delta = choice.get("delta") or choice.get("message") or {}
    return bool(
        choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("reasoning")
        or delta.get("tool_calls")
    )


def _message(text: str) -> str:
    """What an error body says, whatever its shape."""
    try:
        return _said(json.loads(text)["error"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return text.strip()


def _said(error: Any) -> str:
    """What an error says, be it an object or a text."""
    return str(error.get("message", error) if isinstance(error, dict) else error)


def base(url: str) -> str:
    """The server's root: without a trailing slash or `/v1`.

    Raises:
        InvalidArgument: no http or https URL.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument("url", f"must start with http:// or https://, got {url!r}")
    return url.rstrip("/").removesuffix("/v1")


async def discover(
    url: str, *, door: Door | Literal["auto"], model: str | None, headers: Mapping[str, str]
) -> Endpoint:
    """The endpoint at `url`, asking the server for what was not named.

    `auto` takes the chat door where it answers, else completions (models without a chat template).

    Raises:
        Unavailable: no server there, or it lists no model.
    """
    root = base(url)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=30)) as session:
            if model is None:
                async with session.get(root + "/v1/models") as response:
                    listed = (await response.json(content_type=None)).get("data") or []
                if not listed:
                    raise Unavailable(f"{root} lists no model; name one with --model")
                model = str(listed[0]["id"])
            if door == "auto":
                body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
                async with session.post(root + "/v1/chat/completions", json=body) as response:
                    door = "chat" if response.status == 200 else "completions"
    except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise Unavailable(f"{root} does not answer as an OpenAI server does: {error}") from None
    return Endpoint(url=url, door=door, model=model, headers=headers)


def allow_connections(count: int) -> None:
    """Raise the limit of open files to `count` connections.

    Raises:
        InvalidArgument: the system allows fewer; a run that waits for descriptors would measure itself.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise InvalidArgument(
                "max-concurrency", f"{count} connections need {needed} open files, {hard} are allowed"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def stopwatch() -> Callable[[], float]:
    """Seconds since now."""
    began = time.perf_counter()
    return lambda: time.perf_counter() - began
