"""Random EAGLE-3 heads for random targets, and what such a head should propose, computed the slow way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.engine.eagle3 import Eagle3Config, Eagle3Head
from outrider.engine.eagle3_checkpoint import save
from outrider.features import FeatureBlock
from tests.unit.tiny import tiny_llama

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS, WINDOW = 64, 40, 32, (0, 2, 3), 12

Layout = Literal["published", "speculators"]


def random_target(folder: Path, **shape: Any) -> Path:
    """A target that the heads of this module fit."""
    return tiny_llama(folder, **{"vocab": VOCAB, "layers": 4, "hidden": HIDDEN, "max_positions": 512} | shape)


def random_head(folder: Path, target: Path, layout: Layout = "published", **shape: Any) -> Path:
    """Writes a random head; its draft ids are a random choice of the target's, in no order."""
    config = Eagle3Config(
        **{
            "hidden": HIDDEN,
            "intermediate": 48,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 8,
            "target_hidden": HIDDEN,
            "feature_layers": LAYERS,
            "vocab": VOCAB,
            "draft_vocab": DRAFT_VOCAB,
            "window": WINDOW,
        }
        | shape
    )
    head = Eagle3Head(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.35)
    head.target_ids = torch.randperm(config.vocab, generator=generator)[: config.draft_vocab]
    save(head, folder, target=str(target), dtype=torch.float32)
    if layout == "speculators":
        _as_speculators(folder, target)
    return folder


def _as_speculators(folder: Path, target: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    layer = {name: raw[name] for name in raw if name not in ("architectures", "eagle_config", "target_model")}
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "transformer_layer_config": layer,
                "draft_vocab_size": raw["draft_vocab_size"],
                "target_hidden_size": raw["target_hidden_size"],
                "norm_before_residual": raw["norm_before_residual"],
                "sliding_window": raw["sliding_window"],
                "eagle_aux_hidden_state_layer_ids": raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
                "speculators_config": {"verifier": {"name_or_path": str(target)}},
            }
        )
    )


class Reference:
    """The head beside its target in plain passes over everything, with nothing kept from one call to the next."""

    def __init__(self, target: Path, head: Eagle3Head) -> None:
        self.network = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.head = head
        self._table: Tensor = self.network.get_input_embeddings().weight.detach()

    @torch.inference_mode()
    def features(self, tokens: list[int], start: int, end: int) -> FeatureBlock:
        """What the target would send for positions [start, end)."""
        states = self.network(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        rows = torch.cat([states[layer][0] for layer in self.head.config.feature_layers], dim=1)
        return FeatureBlock(start, rows[start:end].to(torch.bfloat16).contiguous().view(torch.uint8).numpy())

    @torch.inference_mode()
    def q(self, tokens: list[int], x: list[int], origin: int) -> NDArray[np.float32]:
        """q of the tokens behind `tokens` + x_1 .. x_i for every i below the number of drafted tokens.

        Args:
            tokens: the committed ones.
            x: the drafted ones, at least one.
            origin: first position whose features the head has.

        Returns:
            [drafted, vocab]
        """
        head = self.head
        config = head.config
        anchor = len(tokens) - 2
        lowest = max(origin, anchor + 1 - (config.window or anchor + 1))
        block = self.features(tokens, lowest, anchor + 1)
        told = torch.from_numpy(block.rows.copy()).view(torch.bfloat16).float()
        hidden = head.fuse(told)
        fed = tokens[lowest + 1 :]
        positions = torch.arange(lowest, anchor + 1)
        rows = []
        key, value = head.key_value(self._table[fed], hidden, positions)
        for slot in range(len(x)):
            token = tokens[-1] if slot == 0 else x[slot - 1]
            last = hidden[-1:] if slot == 0 else head.carry(hidden[-1:])

            def attend(query: Tensor, new_key: Tensor, new_value: Tensor, first: bool = slot == 0) -> Tensor:
                nonlocal key, value
                if not first:
                    key, value = torch.cat((key, new_key)), torch.cat((value, new_value))
                group = config.heads // config.kv_heads
                keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
                weights = (torch.einsum("rhd,khd->hrk", query, keys) * config.head_dim**-0.5).softmax(-1)
                return torch.einsum("hrk,khd->rhd", weights, values)

            hidden = head(self._table[[token]], last, torch.tensor([anchor + slot]), attend)
            q = torch.zeros(config.vocab)
            q[head.target_ids] = head.logits(hidden)[0].softmax(-1)
            rows.append(q.numpy())
        return np.stack(rows)
