"""The training loop: shards in, evaluations out; interrupted at any time, it goes on where it was."""

from __future__ import annotations

import math
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.training.batches import Batch, batches
from outrider.training.held_out import Acceptance, is_held_out
from outrider.training.store import Store
from outrider.training.teacher import Lesson

_POOL_SHARDS = 6
_HELD_OUT_LESSONS = 48


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How a head is trained.

    Attributes:
        seed: Of initial weights and order.
        steps: Unrolled steps.
        thinning: Share of the lessons of a batch that each step passes on to the next.
        rows: Drafting rows of a batch.
        learning_rate: Of the layer at its height.
        fitted_learning_rate: The same for the matrices that start as the target's or as a least-squares fit.
        warm_up: Share of the training over which the learning rates rise.
        acceptance_share: Weight of -log(alpha) in the loss at the end; it rises over the middle of the training.
        step_decay: Weight of each further step's loss beside the one before.
        evaluate_s: Seconds between evaluations (and checkpoints).
    """

    seed: int = 0
    steps: int = 5
    thinning: float = 0.5
    rows: int = 512
    learning_rate: float = 4e-4
    fitted_learning_rate: float = 1e-4
    warm_up: float = 0.03
    acceptance_share: float = 0.8
    step_decay: float = 0.8
    evaluate_s: float = 300.0


class Report(NamedTuple):
    """One evaluation: seconds and answer tokens trained so far, share of the budget, training loss, acceptance."""

    seconds: float
    tokens: int
    progress: float
    loss: float
    acceptance: Acceptance


class Trainer(ABC):
    """A model with its optimiser and its place in the training.

    Args:
        network: What is trained.
        plan: How.
        device: Where.
        groups: The optimiser's groups of weights, each with the `peak` of its learning rate.
    """

    def __init__(
        self, network: nn.Module, plan: TrainingPlan, device: torch.device, groups: list[dict[str, Any]]
    ) -> None:
        self.plan = plan
        self.seconds = 0.0
        self.tokens = 0
        self.curve: list[dict[str, Any]] = []
        self._network = network
        self._device = device
        self._optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    @abstractmethod
    def finish(self, folder: Path, target: str) -> None:
        """Writes the draft as services load it."""

    @abstractmethod
    def _losses(self, batch: Batch, progress: float) -> tuple[Tensor, Tensor]:
        """The loss to minimise, and the one of the first position to report."""

    @abstractmethod
    def _measure(self, lessons: list[Lesson]) -> Acceptance:
        """Acceptance on these."""

    @abstractmethod
    def _own_state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the optimiser's state and the place in the training."""

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
            **self._own_state(),
            "optimiser": self._optimiser.state_dict(),
            "seconds": self.seconds,
            "tokens": self.tokens,
            "curve": self.curve,
        }
        torch.save(state, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)

    def _go_on(self, state: dict[str, Any]) -> None:
        """Takes up a checkpoint's optimiser state and place; the learning rates are this plan's."""
        peaks = [group["peak"] for group in self._optimiser.param_groups]
        self._optimiser.load_state_dict(state["optimiser"])
        for group, peak in zip(self._optimiser.param_groups, peaks, strict=True):
            group["peak"] = peak
        self.seconds, self.tokens, self.curve = state["seconds"], state["tokens"], state["curve"]

    def _acceptance_share(self, progress: float) -> float:
        return self.plan.acceptance_share * min(1.0, max(0.0, (progress - 0.2) / 0.4))

    def _epoch(self, store: Store, drawn: random.Random) -> Iterator[Batch]:
        """Every shard once; a few are open at a time, so that batches mix kinds and memory stays bounded."""
        paths = store.shards()
        drawn.shuffle(paths)
        for start in range(0, len(paths), _POOL_SHARDS):
            lessons = [
                one
                for path in paths[start : start + _POOL_SHARDS]
                for one in store.read(path, lambda place: not is_held_out(place))
            ]
            yield from batches(lessons, self.plan.rows, drawn, self._device)

    def _update(self, batch: Batch, progress: float) -> float:
        rate = _rate(progress, self.plan.warm_up)
        for group in self._optimiser.param_groups:
            group["lr"] = group["peak"] * rate
        with torch.autocast(self._device.type, torch.bfloat16):
            loss, reported = self._losses(batch, progress)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.tokens += int(batch.rows.sum())
        return float(reported.detach())

    def _report(self, held_out: list[Lesson], losses: list[float], progress: float) -> Report:
        with torch.autocast(self._device.type, torch.bfloat16):
            acceptance = self._measure(held_out)
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
    """Lessons that are never trained on, kinds mixed; as many as an evaluation looks at."""
    places = [
        (path, place) for path in store.shards() for place in range(store.info(path).answers) if is_held_out(place)
    ]
    random.Random(0).shuffle(places)
    chosen: dict[Path, set[int]] = {}
    for path, place in places[:_HELD_OUT_LESSONS]:
        chosen.setdefault(path, set()).add(place)
    return [one for path, wanted in chosen.items() for one in store.read(path, wanted.__contains__)]


def _rate(progress: float, warm_up: float) -> float:
    """Share of the peak learning rate: a linear rise, then half a cosine down to a fiftieth."""
    if progress < warm_up:
        return max(progress, 0.05 * warm_up) / warm_up
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warm_up) / (1 - warm_up))))
