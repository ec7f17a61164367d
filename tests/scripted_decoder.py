"""A stand-in for the decoder: says what a script says, in rounds of a set size, through the real interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx

from coordinator.app import build_app
from coordinator.costs import Costs
from coordinator.counters import Counters
from coordinator.front import Front, FrontConfig
from coordinator.parts import DecoderState, Degraded, PartInfo
from coordinator.request import DecodingRequest, Emission, StreamStats
from outrider.tracing import Tracer

MODEL = "stub:script"
EOS = 257
MAX_MODEL_LEN = 512


def part_info(**changes: object) -> PartInfo:
    """A target with the byte tokenizer."""
    values: dict[str, object] = dict.fromkeys(PartInfo.__dataclass_fields__, 0)
    values |= {name: "" for name, kind in PartInfo.__annotations__.items() if kind == "str"}
    values |= {"model_id": MODEL, "dtype": "float32", "tokenizer_size": 258, "vocab_rows": 258}
    values |= {
        "eos_token_ids": (EOS,),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "batch_invariant": True,
        "costs": None,
    }
    return PartInfo(**{**values, **changes})  # type: ignore[arg-type]


class ScriptedStream:
    """Says the decoder's script to one request, cut as the real decoder cuts."""

    def __init__(self, decoder: ScriptedDecoder, request: DecodingRequest) -> None:
        self.request = request
        self.stats = StreamStats(rule=request.rule)
        self.closed = False
        self.said: list[int] = []
        self._decoder = decoder

    async def __aiter__(self) -> AsyncIterator[Emission]:
        decoder, request = self._decoder, self.request
        script = list(decoder.script)
        while True:
            if decoder.gate is not None:
                await decoder.gate.wait()
            if decoder.error is not None and len(self.said) >= decoder.error_after:
                raise decoder.error
            room = request.params.max_tokens - len(self.said)
            tokens = [script[(len(self.said) + i) % len(script)] for i in range(min(decoder.round_size, room))]
            stop_token = None
            for index, token in enumerate(tokens):
                if token in request.params.stop_token_ids:
                    tokens, stop_token = tokens[: index + 1], token
                    break
            cut = request.cut_text(tokens) if request.cut_text else None
            if cut is not None and not (stop_token is not None and cut == len(tokens) - 1):
                tokens, stop_token = tokens[: cut + 1], None
            self.said += tokens
            reason = None
            if stop_token is not None or cut is not None:
                reason = "stop"
            elif len(self.said) == request.params.max_tokens:
                reason = "length"
            drafted = len(tokens) - 1
            if request.num_speculative_tokens == 0:
                drafted = 0
            self.stats.count(drafted, drafted, drafted)
            decoder.counters.count_round(len(tokens), drafted, drafted, drafted)
            flags = tuple(index < drafted for index in range(len(tokens)))
            yield Emission(tuple(tokens), flags, reason, stop_token)
            if reason:
                return
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        self.closed = True


class ScriptedDecoder:
    """Repeats `script` for ever, `round_size` tokens at a time.

    Attributes:
        gate: rounds wait for it, where there is one.
        error: raised once `error_after` tokens were said.
        more_seqs: places of further targets.
        streams: all that were opened.
    """

    def __init__(self, script: Sequence[int] = b"abcdefgh", round_size: int = 3) -> None:
        self.script = script
        self.round_size = round_size
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None
        self.error_after = 0
        self.counters = Counters()
        self.costs = Costs()
        self.files = {"stub:bytes": b""}
        self.target: PartInfo | None = part_info()
        self.more_seqs = 0
        self.degraded: list[Degraded] = []
        self.streams: list[ScriptedStream] = []

    @property
    def state(self) -> DecoderState:
        most = 0 if self.target is None else self.target.max_num_seqs + self.more_seqs
        return DecoderState(self.target, None, int(self.target is not None), self.degraded, None, most)

    async def start(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to end."""

    async def tokenizer_files(self) -> dict[str, bytes]:
        return self.files

    def open(self, request: DecodingRequest) -> ScriptedStream:
        self.streams.append(ScriptedStream(self, request))
        return self.streams[-1]


@asynccontextmanager
async def running_front(
    decoder: ScriptedDecoder, config: FrontConfig | None = None, tracer: Tracer | None = None
) -> AsyncIterator[Front]:
    """A front that takes requests."""
    front = Front(decoder, config or FrontConfig(), tracer)
    await front.start()
    while front.readiness.reason and decoder.target is not None:  # noqa: ASYNC110 - as a client would
        await asyncio.sleep(0.001)
    try:
        yield front
    finally:
        await front.close()


@asynccontextmanager
async def http_client(decoder: ScriptedDecoder, config: FrontConfig | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the HTTP application, without sockets."""
    async with running_front(decoder, config) as front:
        transport = httpx.ASGITransport(build_app(lambda: front))
        async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:
            yield client
