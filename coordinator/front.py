"""What stands behind both doors of one coordinator: the decoder, the served model, admission and metrics."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

from coordinator import loop_lag
from coordinator.admission import Admission
from coordinator.answer import Answer
from coordinator.api_keys import ApiKeys, Keyring
from coordinator.audit import audited
from coordinator.backend import Backend
from coordinator.cost_series import CostSeries
from coordinator.decoding_series import DecodingSeries
from coordinator.metrics import Metrics
from coordinator.part_series import PartSeries
from coordinator.parts import DecoderState, PartInfo
from coordinator.planted import allowing, check_allowed
from coordinator.prepare import Policy, prepare
from coordinator.query import Query
from coordinator.request_trace import RequestTrace, traced
from coordinator.served import Defaults, ServedModel, eos_ids, fingerprint, generation_config
from coordinator.tokenizer import Tokenizer
from outrider.errors import DeadlineExceeded, OutriderError, Unavailable
from outrider.tracing import Tracer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.05
_RETRY_S = 1.0
_BLIP_S = 5.0
"""A request that comes so soon after the last target went away waits for one, as those that are running do: a link that
is made anew after a lost message is no reason to turn anybody away."""
_PREPARING_AT_ONCE = 4
"""Threads that parse, template and tokenise; tokenizers give the interpreter free while they work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """What the operator decided about the doors.

    Attributes:
        served_model_name: by which clients call the model; None takes the target's own name.
        generation_config: "auto" takes sampling defaults from the model's own file, "none" OpenAI's.
        chat_template: replaces the model's own, or None.
        max_speculative_tokens: a request may ask for so many drafted tokens per round at most.
        max_num_seqs: answers decoded at once; None takes the number of all targets that are up together.
        queue_factor: so many times as many may wait, of each API key.
        stream_pacing_s: seconds between the writes of a stream; 0 writes what there is as soon as it is.
        stream_pad: bytes of which a stream's writes are multiples; 0 pads nothing.
        strict_fields: whether unknown request fields are refused.
        allow_planted_errors: whether requests may ask for errors on purpose.
        api_keys: keys that clients must show; without any, nobody is asked.
    """

    served_model_name: str | None = None
    generation_config: str = "auto"
    chat_template: str | None = None
    max_speculative_tokens: int = 16
    max_num_seqs: int | None = None
    queue_factor: int = 4
    stream_pacing_s: float = 0.0
    stream_pad: int = 0
    strict_fields: bool = False
    allow_planted_errors: bool = False
    api_keys: ApiKeys = field(default_factory=ApiKeys)
    policy: Policy = field(default_factory=Policy)


class Readiness(NamedTuple):
    """Whether requests are taken, and what is wrong if anything is.

    Attributes:
        reason: why not, or empty.
    """

    reason: str
    state: DecoderState


class Front:
    """One coordinator. `start` returns at once; requests are taken when a target has been reached."""

    def __init__(self, backend: Backend, config: FrontConfig, tracer: Tracer | None = None) -> None:
        self.config = config
        self._tracer = tracer
        self.keyring = Keyring(config.api_keys)
        self.metrics = Metrics()
        if (rate := config.policy.synthetic_acceptance) is not None:
            logger.warning("MEASURING ONLY: drafted tokens are accepted at a rate of %g, and texts mean nothing", rate)
            self.metrics.synthetic_acceptance.set(rate)
        self.metrics.registry.register(DecodingSeries(backend.counters, config.max_speculative_tokens))
        self.metrics.registry.register(CostSeries(backend.costs, config.max_speculative_tokens))
        self.metrics.registry.register(PartSeries(lambda: backend.state))
        self._backend = backend
        self._model: ServedModel | None = None
        self._obstacle = "no target has been reached yet"
        self._admission: Admission | None = None
        self._draining = False
        self._hurried = asyncio.Event()
        self._preparing = Admission(_PREPARING_AT_ONCE, _PREPARING_AT_ONCE)
        self._tasks: list[asyncio.Task[None]] = []
        self.metrics.watch(
            running=lambda: self._admission.running if self._admission else 0,
            waiting=lambda: self._preparing.waiting + (self._admission.waiting if self._admission else 0),
            planted_errors=lambda: self.planted_errors,
        )

    @property
    def model(self) -> ServedModel:
        """
        Raises:
            Unavailable: no target has been reached yet, or it cannot be served.
        """
        if self._model is None:
            raise Unavailable(self._obstacle)
        return self._model

    @property
    def readiness(self) -> Readiness:
        state = self._backend.state
        if self._draining:
            return Readiness("draining", state)
        if self._model is None:
            return Readiness(self._obstacle, state)
        return Readiness("" if _away_s(state) <= _BLIP_S else "no target answers", state)

    @property
    def places(self) -> int:
        """Answers decoded at once; 0 without a target."""
        state = self._backend.state
        return (self.config.max_num_seqs or state.max_num_seqs) if state.targets_up else 0

    @property
    def planted_errors(self) -> dict[str, bool]:
        """Which parts were started with `--allow-planted-errors`."""
        return allowing(self._backend.state, coordinator=self.config.allow_planted_errors)

    async def start(self) -> None:
        """Begin to connect."""
        await self._backend.start()
        self._tasks = [
            asyncio.create_task(self._load(), name="load the served model"),
            asyncio.create_task(loop_lag.watch(self.metrics.loop_lag.observe), name="measure the event loop"),
        ]

    async def close(self) -> None:
        """End everything that runs or waits; its clients are told that the server is shutting down."""
        self._draining = True
        if self._admission is not None:
            self._admission.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._backend.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and let the others end, for at most `timeout_s` seconds and until `hurry`.

        Returns:
            Answers that have not ended.
        """
        self._draining = True
        if self._admission is None:
            return 0
        waits = (
            asyncio.ensure_future(self._admission.drain(timeout_s)),
            asyncio.ensure_future(self._hurried.wait()),
        )
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        return self._admission.running + self._admission.waiting

    def hurry(self) -> None:
        """Let `drain` wait no longer."""
        self._hurried.set()

    @asynccontextmanager
    async def answer(self, query: Query) -> AsyncIterator[Answer]:
        """Decode the answers to a query for as long as the context lasts.

        Raises:
            InvalidArgument, UnknownModel: the query cannot be answered by anyone.
            Overloaded, Unavailable, DeadlineExceeded: not now.
        """
        arrived_s = time.monotonic()
        with audited(query, arrived_s) as line, traced(self._tracer, line) as trace:
            async with self._decoding(query, arrived_s, trace) as answer:
                line.begun(answer)
                yield answer

    @asynccontextmanager
    async def _decoding(self, query: Query, arrived_s: float, trace: RequestTrace | None) -> AsyncIterator[Answer]:
        if self._draining:
            raise Unavailable("the server is shutting down")
        answers, policy = len(query.prompts) * query.n, self.config.policy
        if self._admission is not None:
            self._admission.check(query.client, answers)  # nobody's prompt is tokenised to be refused
        preparing = partial(prepare, query, self.model, policy)
        prepared = await self.off_loop(query.client, preparing, query.timeout_s)
        if self._admission is None or _away_s(self._backend.state) > _BLIP_S:
            raise Unavailable("no target answers")
        check_allowed(
            prepared.requests[0].planted, [part for part, allows in self.planted_errors.items() if not allows]
        )
        ends_s = arrived_s + prepared.timeout_s
        async with (
            self._admission.slots(query.client, answers, _left_s(ends_s)),
            AsyncExitStack() as stack,
        ):
            streams = []
            for request in prepared.requests:
                streams.append(self._backend.open(replace(request, deadline_s=_left_s(ends_s), trace=trace)))
                stack.push_async_callback(streams[-1].aclose)
            answer = Answer(prepared, streams, self.metrics, arrived_s)
            stack.push_async_callback(answer.aclose)
            yield answer

    async def off_loop(self, client: str, work: Callable[[], T], timeout_s: float | None) -> T:
        """Do what takes longer than a turn of the event loop should (parsers, templates, tokenizers) in a thread.

        A few are at work at once, clients take turns, and of each client as much may wait as answers may.

        Raises:
            Overloaded, DeadlineExceeded: as in `Admission.slots`.
        """
        limit_s = self.config.policy.request_timeout_s
        async with self._preparing.slots(client, 1, min(timeout_s or limit_s, limit_s)):
            working = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(working)
            finally:  # a thread cannot be stopped: when the client has gone, its place is free when it is done
                await asyncio.gather(working, return_exceptions=True)

    async def _load(self) -> None:
        while self._model is None:
            target = self._backend.state.target
            if target is None:
                await asyncio.sleep(_POLL_S)
                continue
            try:
                files = await self._backend.tokenizer_files()
                self._model = await asyncio.to_thread(_served_model, files, target, self.config)
            except Exception as error:  # the files are the model's: whatever is wrong with them is to be said
                self._obstacle = f"the target cannot be served: {error}"
                logger.error("%s", self._obstacle, exc_info=not isinstance(error, OutriderError))
                await asyncio.sleep(_RETRY_S)
                continue
            running = self.places or target.max_num_seqs
            self._admission = Admission(running, running * self.config.queue_factor)
            logger.info("serving %s (%d answers at once)", self._model.name, running)
        await self._follow()

    async def _follow(self) -> None:
        """Targets come and go, and places with them; without any, the queue stays as it is until its time runs out."""
        assert self._admission is not None
        places = 0
        while True:
            if self.places not in (0, places):
                places = self.places
                waiting = places * self.config.queue_factor
                self._admission.resize(places, waiting)
                self._preparing.resize(_PREPARING_AT_ONCE, max(waiting, _PREPARING_AT_ONCE))
            await asyncio.sleep(_POLL_S)


def _away_s(state: DecoderState) -> float:
    """Seconds since the last target went away; 0 while one is there."""
    return 0.0 if state.targets_up else min((p.since_s for p in state.degraded if p.part == "target"), default=math.inf)


def _left_s(ends_s: float) -> float:
    """Seconds until then.

    Raises:
        DeadlineExceeded: there are none.
    """
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded("its time ran out before it was decoded")
    return left_s


def _served_model(files: dict[str, bytes], target: PartInfo, config: FrontConfig) -> ServedModel:
    tokenizer = Tokenizer.from_files(files, config.chat_template)
    generation = generation_config(files)
    return ServedModel(
        name=config.served_model_name or target.model_id,
        root=target.model_id,
        tokenizer=tokenizer,
        defaults=Defaults() if config.generation_config == "none" else Defaults.of_model(generation),
        eos_ids=eos_ids(generation, target.eos_token_ids),
        max_model_len=target.max_model_len,
        vocabulary=min(tokenizer.size, target.vocab_rows),
        max_speculative_tokens=config.max_speculative_tokens,
        fingerprint=fingerprint(
            model=target.model_id,
            revision=target.model_revision,
            weight_hash=target.weight_hash,
            arithmetic=target.arithmetic,
        ),
        created=int(time.time()),
    )
