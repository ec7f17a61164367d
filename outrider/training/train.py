"""Training of an EAGLE-3 head."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.eagle3 import Eagle3Config, Eagle3Head
from outrider.engine.eagle3_checkpoint import save
from outrider.training.batches import Batch
from outrider.training.held_out import Acceptance, measure
from outrider.training.loop import Trainer, TrainingPlan
from outrider.training.teacher import Lesson
from outrider.training.unroll import Embed, Unroll

_FITTED = ("fc.", "carry.", "lm_head.", "midlayer.embed_proj.")


class HeadTrainer(Trainer):
    """A head in training; see `Trainer`.

    Args:
        embed: The target's embedding.
        feature_scale: See `Unroll`.
    """

    def __init__(
        self, head: Eagle3Head, embed: Embed, feature_scale: Tensor, plan: TrainingPlan, device: torch.device
    ) -> None:
        self.head = head.to(device)
        self._scale = feature_scale.to(device)
        self._unroll = Unroll(self.head, embed, self._scale)
        fitted: list[torch.nn.Parameter] = []
        other: list[torch.nn.Parameter] = []
        for name, weight in self.head.named_parameters():
            (fitted if name.startswith(_FITTED) else other).append(weight)
        groups = [{"params": fitted, "peak": plan.fitted_learning_rate}, {"params": other, "peak": plan.learning_rate}]
        super().__init__(self.head, plan, device, groups)

    @classmethod
    def restore(cls, path: Path, embed: Embed, plan: TrainingPlan, device: torch.device) -> HeadTrainer:
        """A trainer as it was when it was saved."""
        state = torch.load(path, map_location=device, weights_only=True)
        head = Eagle3Head(Eagle3Config(**state["config"]))
        head.load_state_dict(state["head"])
        head.target_ids = state["target_ids"]
        trainer = cls(head, embed, state["feature_scale"], plan, device)
        trainer._go_on(state)
        return trainer

    def finish(self, folder: Path, target: str) -> None:
        head = copy.deepcopy(self.head)
        with torch.no_grad():
            head.fc.weight.mul_(self._scale)
        save(head.eval(), folder, target=target)

    def _own_state(self) -> dict[str, Any]:
        return {
            "head": self.head.state_dict(),
            "target_ids": self.head.target_ids,
            "feature_scale": self._scale,
            "config": asdict(self.head.config),
        }

    def _losses(self, batch: Batch, progress: float) -> tuple[Tensor, Tensor]:
        plan = self.plan
        unrolled = self._unroll(batch, plan.steps, plan.thinning, self._acceptance_share(progress))
        weights = [plan.step_decay**i for i in range(len(unrolled))]
        terms = [w * one.loss for w, one in zip(weights, unrolled, strict=True)]
        return torch.stack(terms).sum() / sum(weights), unrolled[0].loss

    def _measure(self, lessons: list[Lesson]) -> Acceptance:
        return measure(self._unroll, lessons, self.plan.steps, self._device)
