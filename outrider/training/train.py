"""The training loop: shards in, a head out; interrupted at any time, it goes on where it was."""

from __future__ import annotations

import copy
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.engine.eagle3 import Eagle3Config, Eagle3Head
from outrider.training.batches import Batch, batches
from outrider.training.held_out import Acceptance, measure
from outrider.training.store import Store
from outrider.training.teacher import Lesson
from outrider.training.unroll import Embed, Unroll

HELD_OUT_EVERY = 16  # one lesson in so many is never trained on
_POOL_SHARDS = 6
_HELD_OUT_LESSONS = 48


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How a head is trained.

    Attributes:
        seed: Of initial weights and order.
        steps: Unrolled steps at the end; training begins with 2.
        thinning: Share of the rows that each step passes on to the next.
        rows: Drafting rows of a batch.
        learning_rate: Of AdamW at its height.
        output_learning_rate: The same for the output matrix, which starts as the target's.
        matrix_learning_rate: Of Muon for the other matrices; 0 trains them by AdamW too.
        warm_up: Share of the training over which the learning rates rise.
        step_decay: Weight of each further step's loss beside the one before.
        evaluate_s: Seconds between evaluations (and checkpoints).
    """

    seed: int = 0
    steps: int = 5
    thinning: float = 0.7
    rows: int = 256
    learning_rate: float = 1.5e-3
    output_learning_rate: float = 5e-4
    matrix_learning_rate: float = 0.0
    warm_up: float = 0.03
    step_decay: float = 0.8
    evaluate_s: float = 300.0


class Report(NamedTuple):
    """One evaluation: seconds and answer tokens trained so far, share of the budget, training loss, acceptance."""

    seconds: float
    tokens: int
    progress: float
    loss: float
    acceptance: Acceptance


class Trainer:
    """A head with its optimisers and its place in the training."""

    def __init__(
        self, head: Eagle3Head, embed: Embed, feature_scale: Tensor, plan: TrainingPlan, device: torch.device
    ) -> None:
        self.head = head.to(device)
        self.plan = plan
        self.seconds = 0.0
        self.tokens = 0
        self.curve: list[dict[str, Any]] = []
        self._device = device
        self._scale = feature_scale.to(device)
        self._unroll = Unroll(self.head, embed, self._scale)
        named = dict(self.head.named_parameters())
        output = [named["lm_head.weight"]]
        matrices = [p for name, p in named.items() if p.dim() == 2 and name != "lm_head.weight"]
        norms = [p for p in named.values() if p.dim() == 1]
        self._optimisers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [{"params": output, "peak": plan.output_learning_rate}, {"params": norms, "peak": plan.learning_rate}],
                betas=(0.9, 0.95),
                weight_decay=0.0,
                fused=True,
            )
        ]
        if plan.matrix_learning_rate:
            self._optimisers.append(
                torch.optim.Muon(
                    [{"params": matrices, "peak": plan.matrix_learning_rate}], weight_decay=0.01, ns_steps=4
                )
            )
        else:
            self._optimisers.append(
                torch.optim.AdamW(
                    [{"params": matrices, "peak": plan.learning_rate}], betas=(0.9, 0.95), weight_decay=0.0, fused=True
                )
            )

    def train(self, store: Store, held_out: list[Lesson], progress: Callable[[], float]) -> Iterator[Report]:
        """Trains until `progress` reaches 1.

        Args:
            store: The lessons; shards that arrive meanwhile are taken up.
            held_out: What to evaluate on.
            progress: Share of the budget that is used; may look at `seconds` and `tokens`.

        Yields:
            An evaluation every `evaluate_s` seconds, and a last one.
        """
        evaluated = self.seconds
        losses: list[float] = []
        drawn = random.Random(f"{self.plan.seed}/{self.tokens}")
        while progress() < 1:
            for batch in self._epoch(store, drawn):
                began = time.monotonic()
                losses.append(self._update(batch, progress()))
                self.seconds += time.monotonic() - began
                if progress() >= 1:
                    break
                if self.seconds - evaluated >= self.plan.evaluate_s:
                    yield self._report(held_out, losses, progress())
                    losses, evaluated = [], self.seconds
        yield self._report(held_out, losses, 1.0)

    def speed(self, batch: Batch) -> float:
        """Tokens per second of an update on this batch with all steps (the update is made)."""
        began = time.monotonic()
        self._update(batch, 1.0)
        return int(batch.rows.sum()) / (time.monotonic() - began)

    def save(self, path: Path) -> None:
        """Writes everything that `restore` needs; whole or not at all."""
        state = {
            "head": self.head.state_dict(),
            "target_ids": self.head.target_ids,
            "feature_scale": self._scale,
            "config": asdict(self.head.config),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "seconds": self.seconds,
            "tokens": self.tokens,
            "curve": self.curve,
        }
        torch.save(state, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)

    def finished(self) -> Eagle3Head:
        """The head for use: the scale of the features folded into `fc`."""
        head = copy.deepcopy(self.head)
        with torch.no_grad():
            head.fc.weight.mul_(self._scale)
        return head.eval()

    @classmethod
    def restore(cls, path: Path, embed: Embed, plan: TrainingPlan, device: torch.device) -> Trainer:
        """A trainer as it was when it was saved."""
        state = torch.load(path, map_location=device, weights_only=True)
        head = Eagle3Head(Eagle3Config(**state["config"]))
        head.load_state_dict(state["head"])
        head.target_ids = state["target_ids"]
        trainer = cls(head, embed, state["feature_scale"], plan, device)
        for optimiser, saved in zip(trainer._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        trainer.seconds, trainer.tokens, trainer.curve = state["seconds"], state["tokens"], state["curve"]
        return trainer

    def _epoch(self, store: Store, drawn: random.Random) -> Iterator[Batch]:
        """Every shard once; a few are open at a time, so that batches mix kinds and memory stays bounded."""
        paths = store.shards()
        drawn.shuffle(paths)
        for start in range(0, len(paths), _POOL_SHARDS):
            lessons = [
                one
                for path in paths[start : start + _POOL_SHARDS]
                for index, one in enumerate(store.read(path))
                if index % HELD_OUT_EVERY
            ]
            yield from batches(lessons, self.plan.rows, drawn, self._device)

    def _update(self, batch: Batch, progress: float) -> float:
        rate = _rate(progress, self.plan.warm_up)
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * rate
        steps = min(self.plan.steps, 2 + int(progress / 0.4 * (self.plan.steps - 1)))
        with torch.autocast(self._device.type, torch.bfloat16):
            unrolled = self._unroll(batch, steps, self.plan.thinning)
        weights = [self.plan.step_decay**i for i in range(len(unrolled))]
        terms = [w * one.loss for w, one in zip(weights, unrolled, strict=True)]
        loss = torch.stack(terms).sum() / sum(weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.tokens += int(batch.rows.sum())
        return float(unrolled[0].loss.detach())

    def _report(self, held_out: list[Lesson], losses: list[float], progress: float) -> Report:
        with torch.autocast(self._device.type, torch.bfloat16):
            acceptance = measure(self._unroll, held_out[:_HELD_OUT_LESSONS], self.plan.steps, self._device)
        report = Report(self.seconds, self.tokens, progress, sum(losses) / max(1, len(losses)), acceptance)
        self.curve.append(
            {
                "seconds": round(self.seconds),
                "tokens": self.tokens,
                "alpha": acceptance.alpha,
                "greedy": acceptance.greedy,
            }
        )
        return report


def held_out_lessons(store: Store) -> list[Lesson]:
    """The lessons that are never trained on, kinds mixed."""
    found = [one for path in store.shards() for i, one in enumerate(store.read(path)) if i % HELD_OUT_EVERY == 0]
    random.Random(0).shuffle(found)
    return found


def _rate(progress: float, warm_up: float) -> float:
    """Share of the peak learning rate: a linear rise, then half a cosine down to a fiftieth."""
    if progress < warm_up:
        return max(progress, 0.05 * warm_up) / warm_up
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warm_up) / (1 - warm_up))))
