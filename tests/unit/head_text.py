"""Streams with features for a draft engine with a head, and the comparison of its proposals with a reference's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.features import FeatureBlock, Features
from outrider.sampling import Form, SamplingParams
from outrider.seam import ProposalBatch, StreamOpen
from tests.service.harness import Item, drafted, open_stream, propose
from tests.unit.drafting import Bench
from tests.unit.heads import VOCAB, WINDOW

SLOTS = 5
SAMPLED = SamplingParams(temperature=1.0, max_tokens=1_000)


class Reference(Protocol):
    """A head beside its target that computes everything anew each time."""

    def features(self, tokens: list[int], start: int, end: int) -> FeatureBlock:
        """What the target would send for positions [start, end)."""
        ...

    def q(self, tokens: list[int], x: list[int], origin: int) -> NDArray[np.float32]:
        """[drafted, vocab]: q of each of x_1 .. behind `tokens`; the head has features from `origin` on."""
        ...


@dataclass
class Text:
    """The coordinator's view of a stream, with features as the target would send them.

    Attributes:
        has: features that the draft has, as far as is known: positions below this one.
        origin: where the head's unbroken features begin.
    """

    stream: StreamOpen
    tokens: list[int]
    has: int = 0
    origin: int = 0
    generation: int = 0
    is_open: bool = False
    asked: int = 0
    x: list[int] = field(default_factory=list)

    @property
    def stream_id(self) -> int:
        return self.stream.stream_id

    def opens(self) -> Iterator[StreamOpen]:
        if not self.is_open:
            self.is_open = True
            yield self.stream

    def block(self, reference: Reference) -> FeatureBlock:
        """What the target answers when asked for features from `has` on."""
        end = len(self.tokens) - 1
        start = max(self.has, end - WINDOW)
        if start > self.has or self.has == 0:
            self.origin = start
        return reference.features(self.tokens, start, end)

    def lost(self) -> None:
        """The draft was started anew."""
        self.is_open, self.has, self.generation = False, 0, self.generation + 1


def text(stream_id: int, rng: np.random.Generator, length: int, form: Form = Form.DENSE) -> Text:
    prompt = rng.integers(0, VOCAB, length).tolist()
    return Text(open_stream(stream_id, prompt, SAMPLED, form=form, draft_key=stream_id), prompt)


def ask(made: Bench, texts: list[Text], gammas: list[int], blocks: dict[int, FeatureBlock]) -> ProposalBatch:
    made.send(
        propose(
            [Item(one.stream_id, one.tokens, 0, one.generation) for one in texts],
            gammas,
            opens=tuple(opened for one in texts for opened in one.opens()),
            features=Features.of(list(blocks.items())),
        )
    )
    batch = made.run()
    slots = drafted(batch)
    for one, gamma in zip(texts, gammas, strict=True):
        one.asked, one.x = gamma, slots[one.stream_id]
    cached = dict(zip(batch.replies.stream_ids.tolist(), batch.replies.cached_lengths.tolist(), strict=True))
    for one in texts:
        one.has = max(cached[one.stream_id] - 1, 0)
    return batch


def check(batch: ProposalBatch, texts: list[Text], reference: Reference) -> None:
    """q of every slot is the reference's; the dense rows are in the order of the batch."""
    rows = iter(batch.slots.dense_q.reshape(-1, VOCAB))
    by_id = {one.stream_id: one for one in texts}
    for stream_id in batch.replies.stream_ids.tolist():
        one = by_id[stream_id]
        assert len(one.x) == one.asked
        for slot, expected in enumerate(reference.q(one.tokens, one.x, one.origin)):
            np.testing.assert_allclose(next(rows), expected, atol=1e-4, err_msg=f"stream {stream_id}, slot {slot}")
    assert next(rows, None) is None


def commit(one: Text, rng: np.random.Generator) -> None:
    """Some slots were accepted; another token follows."""
    k = int(rng.integers(0, len(one.x) + 1))
    one.tokens = [*one.tokens, *one.x[:k], int(rng.integers(0, VOCAB))]
