"""A draft and a target in the test's process, engines and all, behind the coordinator's doors: no thread, no socket.

Every batch goes through the wire's codec. Speculation runs with a fixed gamma unless a request turns it off.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any

from coordinator import decoding, round_end
from coordinator.costs import Costs
from coordinator.counters import Counters
from coordinator.decoding import VerdictAnswer
from coordinator.parts import DecoderState, PartInfo
from coordinator.request import DecodingRequest, Emission, StreamStats
from coordinator.rows import VerifyRow, propose_batch, verify_batch
from coordinator.state import StreamState, new_stream
from outrider.engine.stub import parse
from outrider.engine.stub_model import load_stub
from outrider.errors import InvalidArgument, OutriderError, Status
from outrider.rpc import codec
from outrider.rpc.merge import merge
from outrider.sampling import SamplingParams
from outrider.seam import VerdictBatch
from tests.scripted_decoder import part_info
from tests.unit.drafting import Bench
from tests.unit.target_driver import Target

LIMITS = codec.Limits(max_items=64, max_slots=64)
MS = {"stream_deadline_ms": 1_000_000}

Tamper = Callable[[VerdictBatch], VerdictBatch]


class PurePair:
    """A `coordinator.backend.Backend`.

    Attributes:
        tamper: what happens to each verdict on its way, for planted errors.
        rounds: slots accepted in each round that had some.
    """

    def __init__(
        self, target: Any = "stub:markov", draft: Any = "stub:perfect", *, gamma: int = 4, run: int = 3
    ) -> None:
        self.counters = Counters()
        self.costs = Costs()
        self.rounds: list[int] = []
        self.tamper: Tamper = lambda batch: batch
        self.gamma, self.run = gamma, run
        self.target = Target(_model(target))
        self.bench = Bench(_model(draft), num_blocks=192)
        self._ids = itertools.count(1)
        info = self.target.model.info
        self._info = part_info(
            vocab_rows=info.vocab_rows, eos_token_ids=info.eos_token_ids, max_model_len=min(info.max_positions, 2048)
        )

    @property
    def state(self) -> DecoderState:
        return DecoderState(self._info, None, 1, [], None, self._info.max_num_seqs)

    @property
    def info(self) -> PartInfo:
        return self._info

    async def start(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to end."""

    async def tokenizer_files(self) -> dict[str, bytes]:
        return {"stub:bytes": b""}

    def open(self, request: DecodingRequest) -> PureStream:
        seed = request.seed if request.seed is not None else 11
        return PureStream(self, new_stream(next(self._ids), request, seed))


class PureStream:
    """One answer."""

    def __init__(self, pair: PurePair, state: StreamState) -> None:
        self._pair = pair
        self._state = state

    @property
    def stats(self) -> StreamStats:
        return self._state.stats

    async def __aiter__(self) -> AsyncIterator[Emission]:
        asked = self._state.request.num_speculative_tokens
        gamma = self._pair.gamma if asked is None else asked
        for emission in self._plain(1):
            yield emission
        while not self._ended:
            room = round_end.room(self._state, self._pair.info.max_model_len)
            if gamma and room > 1:
                for emission in self._round(min(gamma, room - 1)):
                    yield emission
            else:
                for emission in self._plain(min(self._pair.run, room)):
                    yield emission

    async def aclose(self) -> None:
        """The services' streams end with the test."""

    @property
    def _ended(self) -> bool:
        return self._state.phase is decoding.Phase.CLOSED

    def _plain(self, credit: int) -> list[Emission]:
        return self._verdicts(decoding.run(self._state, credit, **MS))

    def _round(self, gamma: int) -> list[Emission]:
        pair, state = self._pair, self._state
        row = decoding.propose(state, gamma, draft_deadline_ms=0, **MS)
        sent = codec.propose_from_pb(codec.propose_to_pb(propose_batch([row], [])), LIMITS)
        pair.bench.send(sent.batch)
        proposal = codec.proposal_from_pb(codec.proposal_to_pb(pair.bench.run()))
        (answer,) = decoding.receive_proposals({state.stream_id: state}, proposal)
        assert 1 <= answer.proposal.slots <= gamma  # a draft stops behind a stop id
        return self._verdicts(decoding.verify(state, answer.proposal, **MS))

    def _verdicts(self, row: VerifyRow) -> list[Emission]:
        pair, state = self._pair, self._state
        request = codec.verify_from_pb(codec.verify_to_pb(verify_batch([row], [])), LIMITS)
        assert not request.refused
        pair.target.send(request.batch)
        while pair.target.step():
            pass
        batches, pair.target.link.batches = pair.target.link.batches, []
        batch = pair.tamper(codec.verdict_from_pb(codec.verdict_to_pb(merge(batches))))
        answers = decoding.receive_verdicts({state.stream_id: state}, batch, pair.info.max_model_len)
        return [self._emission(answer) for answer in answers]

    def _emission(self, answer: VerdictAnswer) -> Emission:
        if answer.emission is None:
            field, _, problem = answer.message.partition(": ")
            invalid = answer.status is Status.INVALID_ARGUMENT and field in SamplingParams.__dataclass_fields__
            raise InvalidArgument(field, problem) if invalid else OutriderError(answer.message)
        if answer.round.drafted:
            self._pair.rounds.append(answer.round.accepted)
        return answer.emission


def _model(model: Any) -> Any:
    return _stub(model) if isinstance(model, str) else model


@cache
def _stub(name: str) -> Any:
    """A stub remembers nothing, so that pairs may share it."""
    return load_stub(parse(name))
