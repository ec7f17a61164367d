"""A draft of `--kind lm`: the target with most of its layers taken out, distilled on the target's distributions.

It drafts for any server as an ordinary model of the target's vocabulary, and needs no features.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.training.batches import Batch, collate
from outrider.training.held_out import Acceptance
from outrider.training.loop import Trainer, TrainingPlan
from outrider.training.loss import sparse_loss
from outrider.training.teacher import Lesson

_LESSONS_AT_ONCE = 8


def pruned(target: str, layers: int) -> Any:
    """The model in a folder, in float32, with so many of its layers: evenly spread, the first and the last too."""
    network: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, local_files_only=True)
    decoder, config = network.get_decoder(), network.config.get_text_config()
    last = len(decoder.layers) - 1
    kept = [round(i * last / max(1, layers - 1)) for i in range(layers)]
    decoder.layers = nn.ModuleList([decoder.layers[i] for i in kept])
    for place, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = place
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    return network


class LmTrainer(Trainer):
    """A pruned model in training; its embedding and output matrix stay the target's.

    Args:
        network: From `pruned`.
        source: Folder of the target, for its tokenizer.
    """

    def __init__(self, network: Any, source: str, plan: TrainingPlan, device: torch.device) -> None:
        self._model = network.to(device).train()
        self._source = source
        output = network.get_output_embeddings().weight
        for weight in (network.get_input_embeddings().weight, output):
            weight.requires_grad_(False)
        weights = [weight for weight in network.parameters() if weight.requires_grad]
        super().__init__(network, plan, device, [{"params": weights, "peak": plan.learning_rate}])

    @classmethod
    def restore(cls, path: Path, source: str, plan: TrainingPlan, device: torch.device) -> LmTrainer:
        """A trainer as it was when it was saved."""
        state = torch.load(path, map_location=device, weights_only=True)
        network = pruned(source, state["layers"])
        network.load_state_dict(state["network"], strict=False)
        trainer = cls(network, source, plan, device)
        trainer._go_on(state)
        return trainer

    @property
    def parameters(self) -> int:
        return sum(weight.numel() for weight in self._model.parameters())

    @property
    def layers(self) -> int:
        return int(self._model.config.get_text_config().num_hidden_layers)

    def finish(self, folder: Path, target: str) -> None:
        copy.deepcopy(self._model).to(torch.bfloat16).eval().save_pretrained(folder)
        AutoTokenizer.from_pretrained(self._source, local_files_only=True).save_pretrained(folder)

    def _own_state(self) -> dict[str, Any]:
        trained = {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
        return {"network": {name: weight.detach() for name, weight in trained.items()}, "layers": self.layers}

    def _losses(self, batch: Batch, progress: float) -> tuple[Tensor, Tensor]:
        loss, _, _ = self._score(batch, self._acceptance_share(progress))
        return loss, loss

    @torch.no_grad()
    def _measure(self, lessons: list[Lesson]) -> Acceptance:
        """A model that reads text drafts every position alike: what varies is how many in a row are right."""
        alphas, runs = [], []
        usable = [one for one in lessons if len(one.top_ids) > self.plan.steps]
        for start in range(0, len(usable), _LESSONS_AT_ONCE):
            batch = collate(usable[start : start + _LESSONS_AT_ONCE], self._device)
            _, alpha, likeliest = self._score(batch, 0.0)
            alphas.append(alpha)
            lessons_, places = _rows(batch)
            match = torch.zeros(batch.answer.shape, dtype=torch.bool, device=self._device)
            match[lessons_, places] = likeliest == batch.answer[lessons_, places]
            windows = match.unfold(1, self.plan.steps, 1)
            ends = torch.arange(windows.shape[1], device=self._device) + self.plan.steps - 1
            runs.append(windows[batch.greedy[:, None] & (ends <= batch.rows[:, None])])
        kept = torch.cat(alphas)
        survived = torch.cat(runs).cummin(1).values.float().mean(0) if sum(map(len, runs)) else kept.new_zeros(0)
        return Acceptance((float(kept.mean()),) * self.plan.steps, tuple(survived.tolist()), len(kept))

    def _score(self, batch: Batch, acceptance_share: float) -> tuple[Tensor, Tensor, Tensor]:
        decoder = self._model.get_decoder()
        inside = torch.arange(batch.texts.shape[1], device=self._device) < batch.lengths[:, None]
        hidden = decoder(input_ids=batch.texts, attention_mask=inside, use_cache=False).last_hidden_state
        lessons, places = _rows(batch)
        rows = hidden[lessons, batch.prompts[lessons] - 1 + places].bfloat16()
        weight = self._model.get_output_embeddings().weight.bfloat16()
        return sparse_loss(
            rows, weight, batch.top_ids[lessons, places], batch.top_probs[lessons, places], acceptance_share
        )


def _rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """Lesson and place in its answer of every token that the model predicts."""
    places = torch.arange(batch.answer.shape[1], device=batch.rows.device)
    lessons, found = (places <= batch.rows[:, None]).nonzero(as_tuple=True)
    return lessons, found
