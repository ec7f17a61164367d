"""The coordinator's HTTP door, asked at the lowest priority: half of the places, and nothing new while others wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx

from outrider.errors import InvalidArgument, OutriderError, Status

_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 1.0
_RETRY_S = 0.5
_PATIENCE_S = 60.0
"""For how long others may wait, or the server may refuse, before this gives up."""
_SHARE = 2
"""One in so many of the answers that the server decodes at once."""
_MOST_PLACES = 64
_MOST_ANSWERS = 16
"""Answers to one request at most (`n`)."""
_WAITING = "outrider:num_requests_waiting "


class CannotJudge(OutriderError):
    """Nothing can be said about the pair: no draft, nothing drafted, overloaded, unreachable."""

    status = Status.UNAVAILABLE


class Wish(NamedTuple):
    """One request. Every sampling value is named, because a server's defaults are its model's.

    Attributes:
        gamma: drafted tokens per round; 0 turns speculation off.
        method: the acceptance rule.
        n: answers.
        ends: whether end-of-sequence ids end an answer.
        planted: error to plant where speculation is on.
        logprobs: most probable ids to show of each row; None for none.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    temperature: float
    gamma: int = 0
    method: str = "standard"
    seed: int | None = None
    n: int = 1
    ends: bool = True
    planted: str | None = None
    logprobs: int | None = None

    def body(self) -> dict[str, Any]:
        """Of `POST /v1/completions`."""
        speculative: dict[str, Any] = {"enabled": self.gamma > 0, "method": self.method}
        if self.gamma:
            speculative["num_speculative_tokens"] = self.gamma
            if self.planted is not None:
                speculative["planted_error"] = self.planted
        body: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "n": self.n,
            "ignore_eos": not self.ends,
            "return_token_ids": True,
            "speculative": speculative,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.logprobs is not None:
            body |= {"logprobs": self.logprobs, "return_tokens_as_token_ids": True}
        return body


class Reply(NamedTuple):
    """The answers to one request.

    Attributes:
        prompt: its ids.
        texts: ids of each answer.
        drafted, accepted: drafted tokens that were sent to the target, and that became part of an answer.
        tops: for each token of each answer the log-probabilities of the most probable ids, if they were asked for.
    """

    prompt: tuple[int, ...]
    texts: tuple[tuple[int, ...], ...]
    drafted: int
    accepted: int
    tops: tuple[tuple[dict[int, float], ...], ...] = ()


class Deployment(NamedTuple):
    """What `/ready` says of the pair.

    Attributes:
        places: answers that this may have decoded at once.
        invariant: whether the target found that its rows do not depend on their batch; else `note` says why.
    """

    target: str
    dtype: str
    invariant: bool
    note: str
    draft: str
    places: int

    @property
    def n(self) -> int:
        """Answers per request, of requests for many."""
        return min(_MOST_ANSWERS, self.places)


class Door:
    """A client of one coordinator.

    Args:
        http: with the coordinator's address as base.
        planted: error to plant wherever speculation is on.
    """

    def __init__(self, http: httpx.AsyncClient, *, planted: str | None = None) -> None:
        self._http = http
        self._planted = planted
        self._places = 1
        self._looked_s = 0.0

    async def deployment(self) -> Deployment:
        """
        Raises:
            CannotJudge: there is no target, or no draft.
        """
        ready = await self._get("/ready")
        try:
            state = ready.json()
            target, draft, places = state["target"], state["draft"], int(state["max_num_seqs"])
        except (ValueError, KeyError):
            raise CannotJudge(f"{self._http.base_url} is no coordinator of this version: {ready.text[:200]}") from None
        if ready.status_code != 200 or target is None:
            raise CannotJudge(f"{self._http.base_url} is not ready: {ready.text[:200]}")
        if draft is None:
            why = [part["reason"] for part in state["degraded"] if part["part"] == "draft"]
            raise CannotJudge("no draft is attached" + (f": {why[0]}" if why else ""))
        self._places = min(max(places // _SHARE, 1), _MOST_PLACES)
        return Deployment(
            target=target["model"],
            dtype=target["dtype"],
            invariant=bool(target["batch_invariant"]),
            note=target["batch_invariance_note"],
            draft=draft["model"] or draft["kind"],
            places=self._places,
        )

    async def all(self, wishes: Sequence[Wish], arrived: Callable[[int], None] = lambda answers: None) -> list[Reply]:
        """Everything, as much of it at once as there are places, in order.

        Args:
            arrived: told how many answers there are so far.

        Raises:
            CannotJudge, InvalidArgument: the first that any request ended in.
        """
        most = max(wish.n for wish in wishes)
        turns = asyncio.Semaphore(max(self._places // most, 1))
        answers = 0

        async def one(wish: Wish) -> Reply:
            nonlocal answers
            async with turns:
                await self._let_others_go_first()
                reply = await self.ask(wish)
            answers += wish.n
            arrived(answers)
            return reply

        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(one(wish)) for wish in wishes]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return [task.result() for task in asked]

    async def ask(self, wish: Wish) -> Reply:
        """
        Raises:
            CannotJudge: unreachable, or refused for longer than is worth waiting for.
            InvalidArgument: the request is not one for this server.
        """
        end_s = time.monotonic() + _PATIENCE_S
        while True:
            answer = await self._post(wish._replace(planted=self._planted).body())
            if answer.status_code == 200:
                return _reply(answer.json())
            problem = _problem(answer)
            if answer.status_code == 400:
                raise InvalidArgument(problem.get("param") or "request", problem["message"])
            if answer.status_code not in (429, 503) or time.monotonic() > end_s:
                raise CannotJudge(f"{self._http.base_url} answers {answer.status_code}: {problem['message']}")
            await asyncio.sleep(_RETRY_S)

    async def _let_others_go_first(self) -> None:
        """Waits while anybody's request waits for a place.

        Raises:
            CannotJudge: that does not end.
        """
        end_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() - self._looked_s > _LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            if _waiting((await self._get("/metrics")).text) == 0:
                return
            if time.monotonic() > end_s:
                raise CannotJudge(f"the server is overloaded: requests have been waiting for {_PATIENCE_S:g} s")
            await asyncio.sleep(_LOOK_EVERY_S + _RETRY_S)

    async def _get(self, path: str) -> httpx.Response:
        try:
            return await self._http.get(path, timeout=_PATIENCE_S)
        except httpx.HTTPError as error:
            raise CannotJudge(f"{self._http.base_url} cannot be reached: {error}") from None

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        try:
            return await self._http.post("/v1/completions", json=body, timeout=_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise CannotJudge(f"{self._http.base_url} cannot be reached: {error or type(error).__name__}") from None


def _reply(answer: dict[str, Any]) -> Reply:
    counts = answer["metrics"]["speculative_decoding"]
    return Reply(
        prompt=tuple(answer["choices"][0]["prompt_token_ids"]),
        texts=tuple(tuple(choice["token_ids"]) for choice in answer["choices"]),
        drafted=counts["num_draft_tokens"],
        accepted=counts["num_accepted_draft_tokens"],
        tops=tuple(_tops(choice["logprobs"]) for choice in answer["choices"] if choice.get("logprobs")),
    )


def _tops(logprobs: dict[str, Any]) -> tuple[dict[int, float], ...]:
    """Of one answer; names are written `token_id:123`."""
    return tuple(
        {int(name.removeprefix("token_id:")): value for name, value in row.items()} for row in logprobs["top_logprobs"]
    )


def _problem(answer: httpx.Response) -> dict[str, Any]:
    """The error object, or as much of what came in its place."""
    try:
        return dict(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return {"message": answer.text[:200]}


def _waiting(metrics: str) -> float:
    """Requests that wait for a place."""
    lines = [line for line in metrics.splitlines() if line.startswith(_WAITING)]
    return float(lines[0].split()[-1]) if lines else 0.0
