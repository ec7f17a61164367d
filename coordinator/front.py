"""What stands behind both doors of one coordinator: the decoder, the served model, admission and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from coordinator.admission import Admission
from coordinator.answer import Answer
from coordinator.backend import Backend
from coordinator.decoding_series import DecodingSeries
from coordinator.metrics import Metrics
from coordinator.parts import DecoderState, PartInfo
from coordinator.prepare import Policy, prepare
from coordinator.query import Query
from coordinator.served import Defaults, ServedModel, eos_ids, fingerprint, generation_config
from coordinator.tokenizer import Tokenizer
from outrider.errors import DeadlineExceeded, OutriderError, Unavailable

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """What the operator decided about the doors.

    Attributes:
        served_model_name: by which clients call the model; None takes the target's own name.
        generation_config: "auto" takes sampling defaults from the model's own file, "none" OpenAI's.
        chat_template: replaces the model's own, or None.
        max_speculative_tokens: a request may ask for so many drafted tokens per round at most.
        max_num_seqs: answers decoded at once; None takes the target's number.
        queue_factor: so many times as many may wait.
        strict_fields: whether unknown request fields are refused.
    """

    served_model_name: str | None = None
    generation_config: str = "auto"
    chat_template: str | None = None
    max_speculative_tokens: int = 16
    max_num_seqs: int | None = None
    queue_factor: int = 4
    strict_fields: bool = False
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

    def __init__(self, backend: Backend, config: FrontConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        self.metrics.registry.register(DecodingSeries(backend.counters, config.max_speculative_tokens))
        self._backend = backend
        self._model: ServedModel | None = None
        self._obstacle = "no target has been reached yet"
        self._admission: Admission | None = None
        self._draining = False
        self._loading: asyncio.Task[None] | None = None
        self.metrics.watch(
            running=lambda: self._admission.running if self._admission else 0,
            waiting=lambda: self._admission.waiting if self._admission else 0,
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
        return Readiness("" if state.targets_up else "no target answers", state)

    async def start(self) -> None:
        """Begin to connect."""
        await self._backend.start()
        self._loading = asyncio.create_task(self._load(), name="load the served model")

    async def close(self) -> None:
        """End everything that is running."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self._backend.close()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and let the running ones end, for at most `timeout_s` seconds."""
        self._draining = True
        if self._admission is not None and not await self._admission.drain(timeout_s):
            logger.warning("%d answers did not end within %g s", self._admission.running, timeout_s)

    @asynccontextmanager
    async def answer(self, query: Query) -> AsyncIterator[Answer]:
        """Decode the answers to a query for as long as the context lasts.

        Raises:
            InvalidArgument, UnknownModel: the query cannot be answered by anyone.
            Overloaded, Unavailable, DeadlineExceeded: not now.
        """
        arrived_s = time.monotonic()
        if self._draining:
            raise Unavailable("the server is shutting down")
        # Tokenisers and templates take milliseconds for long prompts: never on the event loop.
        prepared = await asyncio.to_thread(prepare, query, self.model, self.config.policy)
        if self._admission is None or not self._backend.state.targets_up:
            raise Unavailable("no target answers")
        ends_s = arrived_s + prepared.timeout_s
        async with (
            self._admission.slots(len(prepared.requests), _left_s(ends_s)),
            AsyncExitStack() as stack,
        ):
            streams = []
            for request in prepared.requests:
                streams.append(self._backend.open(replace(request, deadline_s=_left_s(ends_s))))
                stack.push_async_callback(streams[-1].aclose)
            answer = Answer(prepared, streams, self.metrics, arrived_s)
            stack.push_async_callback(answer.aclose)
            stack.callback(_log, answer, arrived_s)
            yield answer

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
            running = self.config.max_num_seqs or target.max_num_seqs
            self._admission = Admission(running, running * self.config.queue_factor)
            logger.info("serving %s (%d answers at once)", self._model.name, running)


def _left_s(ends_s: float) -> float:
    """Seconds until then.

    Raises:
        DeadlineExceeded: there are none.
    """
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded("its time ran out before it was decoded")
    return left_s


def _log(answer: Answer, arrived_s: float) -> None:
    """One line per request, at its end."""
    usage, elapsed_s = answer.usage, time.monotonic() - arrived_s
    logger.info("%d prompt and %d generated tokens in %.3f s", usage.prompt_tokens, usage.completion_tokens, elapsed_s)


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
            model=target.model_id, revision=target.model_revision, weight_hash=target.weight_hash, dtype=target.dtype
        ),
        created=int(time.time()),
    )
