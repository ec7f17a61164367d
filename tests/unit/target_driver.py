"""A target without a thread, a socket or a coordinator: messages in, steps run to quiet, verdicts out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.distribution import TOTAL, CountRow
from outrider.engine.block_manager import BlockManager
from outrider.engine.grammar import Grammars
from outrider.engine.runner import Step, StepTiming, Wait
from outrider.errors import Status
from outrider.features import NOT_WANTED, FeatureBlock, FeatureRequest
from outrider.noise import Role, subkey, uniforms
from outrider.rpc.link import Attached, Delivery
from outrider.rule import accepted_counts, matched_counts
from outrider.sampling import Form, Rule, SamplingParams
from outrider.seam import Cut, Slots, StreamOpen, VerdictBatch, VerifyBatch
from target_service.verifier import Limits, Verifier
from tests.service.harness import Item, items_of

OWNER = b"test coordinator"


class Draft(NamedTuple):
    """Drafted tokens with their q: a count row, None for one-hot; or dense rows for all of them."""

    x: list[int]
    q: list[CountRow | None] | None = None
    dense: NDArray[np.float32] | None = None


@dataclass(slots=True)
class Verdict:
    """One reply item, read back from the columns."""

    stream_id: int
    generation: int
    committed: int
    cached: int
    status: Status
    error: str
    cut: Cut
    p: NDArray[np.float32]
    emit: list[int]
    bonus: int
    features: FeatureBlock | None = None


class Link:
    """Collects what the target answers."""

    def __init__(self) -> None:
        self.batches: list[VerdictBatch] = []
        self.finished = 0

    def reply(self, batch: VerdictBatch, answered: int) -> None:
        self.batches.append(batch)
        self.finished += answered

    def take(self) -> list[Verdict]:
        """Everything answered since the last call."""
        batches, self.batches = self.batches, []
        return [verdict for batch in batches for verdict in rows_of(batch)]


class Target:
    """A verifier on a model, driven by hand on a simulated clock."""

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_model_len: int = 2048,
        lease_s: float = 10.0,
        drawable: int | None = None,
    ) -> None:
        self.model = model
        self.now = 0.0
        self.link = Link()
        self.steps: list[list[int]] = []
        self.verifier = Verifier(
            BlockManager(num_blocks, block_size),
            vocab=model.info.vocab_rows,
            drawable=drawable or model.info.vocab_rows,
            limits=Limits(max_num_seqs, max_num_batched_tokens, max_model_len),
            lease_s=lease_s,
            hidden_states=getattr(model, "hidden_states", None),
            grammars=Grammars(None, model.info.vocab_rows, model.info.eos_token_ids),
            clock=lambda: self.now,
        )
        self.attach()

    def attach(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.verifier.receive(Attached(owner=OWNER, epoch=epoch, excluded_ids=np.empty(0, np.uint32)))

    def send(self, batch: VerifyBatch, *, owner: bytes = OWNER) -> None:
        self.verifier.receive(
            Delivery(
                owner=owner,
                epoch=self.epoch,
                link=self.link,  # type: ignore[arg-type]
                batch=batch,
                refused=frozenset(),
                arrived_s=self.now,
            )
        )

    @torch.inference_mode()
    def step(self) -> bool:
        """Runs one step; waits for streams on their way pass in no time. False if nothing is to be done."""
        while True:
            plan = self.verifier.plan()
            if isinstance(plan, Step):
                break
            if not isinstance(plan, Wait) or plan.seconds > 1:
                return False
            self.now += plan.seconds
        self.steps.append([span.stream_id for span in plan.spans])
        if plan.copies:
            self.model.copy_kv(plan.copies)
        logits = self.model.forward(plan.spans)
        started, self.now = self.now, self.now + 0.01
        timing = StepTiming(started, lambda: 10.0, len(plan.spans), sum(len(span.tokens) for span in plan.spans))
        try:
            self.verifier.finish(plan, logits, timing)
        except Exception as error:
            self.verifier.fail(plan, error)
            raise
        self.verifier.streams.check_integrity()
        return True

    def settle(self) -> list[Verdict]:
        """Steps until nothing is left to do; what was answered."""
        while self.step():
            pass
        return self.link.take()


@dataclass(slots=True)
class Stream:
    """The coordinator's view of a stream: committed tokens and the rule, in a few lines.

    Attributes:
        base: position from which committed tokens are sent; what the target said it holds.
    """

    stream_id: int
    prompt: list[int]
    params: SamplingParams
    rule: Rule = Rule.STANDARD
    form: Form = Form.SPARSE
    seed: int = 0
    sample_index: int = 0
    tokens: list[int] = field(default_factory=list)
    generation: int = 0
    base: int = 0
    is_open: bool = False
    accepted: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def text(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def opening(self) -> tuple[StreamOpen, ...]:
        """The stream's introduction, the first time."""
        if self.is_open:
            return ()
        self.is_open = True
        return (
            StreamOpen(
                stream_id=self.stream_id,
                prompt_length=len(self.prompt),
                params=self.params,
                rule=self.rule,
                form=self.form,
                emit_key=subkey(self.seed, Role.EMIT),
                gumbel_key=subkey(self.seed, Role.GUMBEL),
                sample_index=self.sample_index,
            ),
        )

    def item(self) -> Item:
        base = min(self.base, len(self.tokens) - 1)
        return Item(self.stream_id, list(self.tokens), base, self.generation)

    def lost(self) -> None:
        """The target dropped the stream: open it again with all tokens."""
        self.is_open, self.base = False, 0
        self.generation += 1

    def accept(self, verdict: Verdict, draft: Draft | None) -> int:
        """Applies the rule to a verdict and commits; the number of accepted slots."""
        m, start = len(verdict.emit), len(self.tokens)
        x = draft.x[:m] if draft is not None else []
        if self.rule is Rule.COUPLED or self.params.greedy:
            k = int(matched_counts(np.array(x), np.array(verdict.emit), np.array([m]))[0])
        else:
            own = [_own(draft, slot) for slot in range(m)] if draft is not None else []
            u = uniforms(
                np.full(m, subkey(self.seed, Role.ACCEPT), np.uint64),
                np.full(m, start, np.uint32),
                np.arange(m, dtype=np.uint32),
                np.full(m, self.sample_index, np.uint32),
                Role.ACCEPT,
            )
            k = int(accepted_counts(verdict.p, np.array(own), u, np.array([m]))[0])
        self.tokens += [*x[:k], verdict.bonus if k == m else verdict.emit[k]]
        self.base = min(verdict.cached, start + k)
        self.accepted += k
        return k


class Wish(NamedTuple):
    """Features that every item of a message asks for, from these positions on."""

    request: FeatureRequest
    first: list[int]


def verify(
    rows: Sequence[tuple[Stream, Draft]], *, closed: Sequence[int] = (), wish: Wish | None = None
) -> VerifyBatch:
    """A message that has these drafts verified."""
    return _message([stream for stream, _ in rows], [draft for _, draft in rows], [0] * len(rows), closed, wish)


def plain(streams: Sequence[Stream], run: int, *, closed: Sequence[int] = (), wish: Wish | None = None) -> VerifyBatch:
    """A message that has these streams decoded plainly."""
    return _message(list(streams), [Draft([]) for _ in streams], [run] * len(streams), closed, wish)


def close(*stream_ids: int) -> VerifyBatch:
    return _message([], [], [], stream_ids)


def decode(
    target: Target, streams: Sequence[Stream], draft: Callable[[Stream], Draft], length: int, *, run: int = 4
) -> None:
    """Decodes until each stream has `length` tokens of text; streams that the target drops are opened again.

    An item that waits for room stays outstanding; the others go on.
    """
    by_id = {stream.stream_id: stream for stream in streams}
    outstanding: dict[int, Draft] = {}
    run_ends: dict[int, int] = {}
    while by_id:
        free = [stream for stream in by_id.values() if stream.stream_id not in outstanding]
        outstanding.update({stream.stream_id: draft(stream) for stream in free})
        drafted = [(stream, outstanding[stream.stream_id]) for stream in free if outstanding[stream.stream_id].x]
        plainly = [stream for stream in free if not outstanding[stream.stream_id].x]
        run_ends.update({stream.stream_id: len(stream.tokens) + run for stream in plainly})
        if drafted:
            target.send(verify(drafted))
        if plainly:
            target.send(plain(plainly, run))
        for verdict in target.settle():
            stream = by_id[verdict.stream_id]
            if verdict.status is not Status.OK:
                assert verdict.status is Status.ABORTED, verdict.error
                stream.lost()
                del outstanding[stream.stream_id]
                continue
            assert (verdict.generation, verdict.committed) == (stream.generation, len(stream.tokens))
            sent = outstanding[stream.stream_id]
            stream.accept(verdict, sent)
            if sent.x or len(stream.tokens) >= run_ends[stream.stream_id]:
                del outstanding[stream.stream_id]
        done = [stream_id for stream_id, stream in by_id.items() if len(stream.text) >= length]
        if done:
            target.send(close(*done))
        for stream_id in done:
            del by_id[stream_id]


def nothing(stream: Stream) -> Draft:
    """A draft that drafts nothing."""
    return Draft([])


def guesses(reference: dict[int, list[int]], vocab: int, seed: int, *, most: int = 6) -> Callable[[Stream], Draft]:
    """A draft that knows the text and gets each slot right with chance .7, of a random length, sometimes none."""
    draw = random.Random(seed)

    def draft(stream: Stream) -> Draft:
        text, at = reference[stream.stream_id], len(stream.text)
        right = text[at : at + draw.randint(0, most)]
        return Draft([token if draw.random() < 0.7 else draw.randrange(vocab) for token in right])

    return draft


def _own(draft: Draft, slot: int) -> int:
    row = draft.q[slot] if draft.q is not None else None
    return TOTAL if row is None else int(row.counts[row.ids == draft.x[slot]][0])


def _message(
    streams: list[Stream], drafts: list[Draft], runs: list[int], closed: Sequence[int], wish: Wish | None = None
) -> VerifyBatch:
    return VerifyBatch(
        items=items_of([stream.item() for stream in streams]),
        slots=_slots(drafts),
        runs=np.array(runs, np.uint16),
        opens=tuple(opening for stream in streams for opening in stream.opening()),
        closed=np.array(closed, np.uint64),
        features_from=np.array(wish.first if wish else [NOT_WANTED] * len(streams), np.uint32),
        feature_request=wish.request if wish else None,
    )


def _slots(drafts: list[Draft]) -> Slots:
    own = [_own(draft, slot) - 1 for draft in drafts for slot in range(len(draft.x))]
    rows = [row for draft in drafts for row in (draft.q if draft.q is not None else [None] * len(draft.x))]
    dense = [draft.dense.ravel() for draft in drafts if draft.dense is not None]
    return Slots(
        per_item=np.array([len(draft.x) for draft in drafts], np.uint8),
        draft_ids=np.array([token & 0xFFFFFFFF for draft in drafts for token in draft.x], np.uint32),
        own_counts=np.array(own, np.uint16),
        support_sizes=np.array([0 if row is None else len(row.ids) for row in rows], np.uint16),
        q_ids=np.concatenate([np.empty(0, np.uint32), *(row.ids for row in rows if row is not None)]),
        q_counts=np.concatenate(
            [np.empty(0, np.uint16), *((row.counts - 1).astype(np.uint16) for row in rows if row is not None)]
        ),
        dense_q=np.concatenate([np.empty(0, np.float32), *dense]),
    )


def rows_of(batch: VerdictBatch) -> list[Verdict]:
    """The reply items of a batch."""
    replies = batch.replies
    ends = np.cumsum(batch.slots_done, dtype=np.int64)
    features = dict(batch.features.blocks())
    return [
        Verdict(
            stream_id=int(replies.stream_ids[index]),
            generation=int(replies.generations[index]),
            committed=int(replies.committed_lengths[index]),
            cached=int(replies.cached_lengths[index]),
            status=replies.status(index),
            error=replies.errors.get(index, ""),
            cut=Cut(int(batch.cuts[index])),
            p=batch.p[ends[index] - batch.slots_done[index] : ends[index]],
            emit=batch.emit[ends[index] - batch.slots_done[index] : ends[index]].tolist(),
            bonus=int(batch.bonus[index]),
            features=features.get(int(replies.stream_ids[index])),
        )
        for index in range(len(replies))
    ]
