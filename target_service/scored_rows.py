"""Which rows of a step's logits are judged, and which are only looked at for log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.engine.span import Span
from outrider.engine.transfer import indices
from outrider.errors import OutriderError
from outrider.logprobs import LogprobRows
from target_service.item import Stream
from target_service.logprobs import RawRows, Wanted, of_round
from target_service.round import Round, Verdict


class ScoredRows:
    """The rows of a step, span by span.

    Usually all of them belong to rounds; a prompt whose log-probabilities are wanted brings rows of its own before
    those of its first round.
    """

    def __init__(self, rows: int) -> None:
        """`rows` of logits there are."""
        self._rows = rows
        self._next = 0
        self._judged: list[int] = []
        self._starts: list[int] = []
        self._prompts: list[tuple[Stream, Span, Wanted]] = []
        self._looked_at: list[int] = []

    def add(self, stream: Stream, span: Span, *, last: bool) -> None:
        """Accounts for the next span, before it is taken as fed; `last` where it completes its round."""
        first, self._next = self._next, self._next + span.wanted
        if stream.prompt is not None and stream.scores_prompt:
            wanted = stream.prompt.wanted(span, first, stream.sequence.tokens)
            self._prompts.append((stream, span, wanted))
            self._looked_at += wanted.rows
        if last:
            rows = range(self._next - stream.tail, self._next)
            self._starts.append(rows[0])
            self._judged += rows
            if stream.opened.logprobs is not None:
                self._looked_at += rows

    def judged(self, logits: Tensor) -> Tensor:
        """The rows of the rounds; all of them without a copy."""
        if len(self._judged) == self._rows:
            return logits
        return logits[indices(self._judged, logits.device)]

    def raw(self, logits: Tensor) -> RawRows | None:
        """The rows of which log-probabilities are wanted, before anything touches them; None without any."""
        return RawRows(logits, sorted(set(self._looked_at))) if self._looked_at else None

    def take(
        self, raw: RawRows, rounds: Sequence[Round], verdicts: Sequence[Verdict | OutriderError]
    ) -> dict[int, LogprobRows]:
        """The block of each round by stream id; prompts take theirs in."""
        scored = {
            a_round.opened.stream_id: of_round(
                a_round.opened, start, a_round.proposal.x, a_round.proposal.slots, verdict
            )
            for start, a_round, verdict in zip(self._starts, rounds, verdicts, strict=True)
            if a_round.opened.logprobs is not None and not isinstance(verdict, OutriderError)
        }
        blocks = raw.take([*scored.values(), *(wanted for _, _, wanted in self._prompts)])
        for (stream, span, _), block in zip(self._prompts, blocks[len(scored) :], strict=True):
            if stream.prompt is not None:
                stream.prompt.add(span, block)
        return dict(zip(scored, blocks, strict=False))
