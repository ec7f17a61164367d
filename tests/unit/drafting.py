"""A draft engine without threads or gRPC: messages in, steps one by one, batches out, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draft_service.draft_ids import DraftIds
from draft_service.head_proposer import HeadProposer
from draft_service.intake import send_as_is
from draft_service.proposer import Proposer
from draft_service.sampler import Sampler
from outrider.engine import worker
from outrider.engine.block_manager import BlockManager
from outrider.engine.grammar import Grammars
from outrider.engine.head_model import HeadModel
from outrider.engine.runner import Step, StepTiming, Wait
from outrider.engine.streams import Streams
from outrider.rpc.link import Attached, Delivery, Detached
from outrider.rpc.merge import merge
from outrider.seam import U32, ProposalBatch, ProposeBatch
from tests.service.harness import drafted

OWNER = b"test coordinator"
LEASE_S = 10.0


def noted_timing(order: list[str], started: float, measure: Callable[[], float], *rest: int) -> StepTiming:
    """A timing that notes when it is asked for."""

    def noted() -> float:
        order.append("measure")
        return measure()

    return worker.StepTiming(started, noted, *rest)


class Link:
    """Collects what a proposer sends."""

    def __init__(self) -> None:
        self.batches: list[ProposalBatch] = []
        self.answered = 0

    def reply(self, batch: ProposalBatch, answered: int) -> None:
        self.batches.append(batch)
        self.answered += answered

    def take(self) -> ProposalBatch:
        """Everything sent so far, as one batch."""
        batches, self.batches = self.batches, []
        return merge(batches)


class Bench:
    """A proposer on a model, stepped by hand."""

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
        max_model_len: int | None = None,
        window: int | None = None,
        draft_top_k: int = 128,
        greedy_draft: bool = False,
        excluded: U32 | None = None,
        send: Any = send_as_is,
    ) -> None:
        self.now = 1_000.0
        self.model = model
        self.blocks = BlockManager(
            num_blocks or model.num_blocks, model.info.block_size, reuse=not isinstance(model, HeadModel)
        )
        grammars = Grammars(None, model.info.vocab_rows, model.info.eos_token_ids)
        self.streams = Streams(self.blocks, LEASE_S, lambda: self.now, matcher=grammars.mirror)
        ids = DraftIds(model.target_ids, model.info.vocab_rows) if isinstance(model, HeadModel) else None
        sampler = Sampler(draft_top_k=draft_top_k, greedy_draft=greedy_draft, ids=ids)
        limits: dict[str, Any] = {
            "vocab_rows": model.info.vocab_rows,
            "max_model_len": max_model_len or model.info.max_positions,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "clock": lambda: self.now,
            "send": send,
        }
        self.proposer = (
            HeadProposer(self.streams, sampler, model.features, **limits)
            if isinstance(model, HeadModel)
            else Proposer(self.streams, sampler, window=window, **limits)
        )
        self.link = Link()
        self.steps: list[Step[Any]] = []
        self.attach(excluded)

    def attach(self, excluded: U32 | None = None, epoch: int = 1) -> None:
        ids = torch.empty(0).numpy().astype("uint32") if excluded is None else excluded
        self.proposer.receive(Attached(owner=OWNER, epoch=epoch, excluded_ids=ids))

    def detach(self, epoch: int = 1) -> None:
        self.proposer.receive(Detached(owner=OWNER, epoch=epoch))

    def send(self, batch: ProposeBatch, epoch: int = 1) -> None:
        self.proposer.receive(
            Delivery(owner=OWNER, epoch=epoch, link=self.link, batch=batch, refused=frozenset(), arrived_s=self.now)  # type: ignore[arg-type]
        )

    def step(self, took_s: float = 0.0, row_s: float = 0.0) -> bool:
        """One turn of the engine: True if a step ran; it took so long, and so long for each row."""
        plan = self.proposer.plan()
        if plan is None or isinstance(plan, Wait):
            return False
        self.steps.append(plan)
        with torch.inference_mode():
            if plan.copies:
                self.model.copy_kv(plan.copies)
            logits = self.model.forward(plan.spans)
            tokens = sum(len(span.tokens) for span in plan.spans)
            took_s += row_s * tokens
            started = self.now
            self.now += took_s
            self.proposer.finish(plan, logits, StepTiming(started, lambda: took_s * 1_000, len(plan.spans), tokens))
        return True

    def run(self) -> ProposalBatch:
        """Steps until nothing is left to do; what was answered."""
        while self.step():
            pass
        self.streams.check_integrity()
        return self.link.take()

    def propose(self, batch: ProposeBatch) -> dict[int, list[int]]:
        """Drafted ids by stream."""
        self.send(batch)
        return drafted(self.run())
