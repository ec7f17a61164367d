"""Small random targets with an MTP layer, in the layout of published checkpoints, and what it should propose."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig

from outrider.features import FeatureBlock
from tests.unit.tiny import byte_tokenizer

Kind = Literal["glm4_moe", "deepseek_v3"]
VOCAB, HIDDEN, DEPTH = 64, 128, 2
WEIGHTS = "model.safetensors"
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def mtp_target(folder: Path, kind: Kind = "glm4_moe", *, aligned: bool = False, vocab: int = VOCAB) -> Path:
    """Writes a random target whose checkpoint holds an MTP layer behind its last one.

    Args:
        aligned: makes each token depend on the one before it almost alone, and the layer one that knows which: it
            turns a hidden state into that of the next position. A good draft, and one that must have the right rows.
        vocab: with 257 or more the folder gets a byte-level tokenizer.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = AutoModelForCausalLM.from_config(_config(kind, vocab), dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(folder)
    if vocab >= 257:
        byte_tokenizer(folder, vocab)
    tensors = load_file(folder / WEIGHTS)
    generator = torch.Generator().manual_seed(11)
    last, behind = f"model.layers.{DEPTH - 1}.", f"model.layers.{DEPTH}."
    for name in [name for name in tensors if name.startswith(last)]:
        noise = torch.randn(tensors[name].shape, generator=generator)
        tensors[name.replace(last, behind)] = 1 + 0.1 * noise if "norm" in name else 0.15 * noise
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{behind}{name}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    tensors[f"{behind}eh_proj.weight"] = 0.15 * torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)
    if aligned:
        _align(tensors, behind)
    # Published checkpoints hold copies of what the layer shares with its target.
    tensors[f"{behind}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{behind}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def _config(kind: Kind, vocab: int) -> Any:
    shape = _SHAPE | {"vocab_size": vocab}
    if kind == "glm4_moe":
        return Glm4MoeConfig(**shape, num_key_value_heads=2, head_dim=8, use_qk_norm=True, attention_bias=True)
    latent = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    return DeepseekV3Config(**shape, num_key_value_heads=4, **latent)


def _align(tensors: dict[str, Tensor], behind: str) -> None:
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 1e-3
    vocab = len(tensors["lm_head.weight"])
    states = tensors["model.embed_tokens.weight"]
    states = states / states.square().mean(1, keepdim=True).sqrt()
    following = (states @ tensors["lm_head.weight"].T).argmax(1)
    step = torch.linalg.lstsq(states, states[following]).solution
    assert 2 * vocab <= HIDDEN, "the matrix is well conditioned"
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{behind}{name}.weight"] = torch.ones(HIDDEN)
    tensors[f"{behind}eh_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), step.T], dim=1).contiguous()


class MtpReference:
    """The layer beside its target in plain passes over everything: attention by transformers, the rest by hand.

    The layer is read as one more ordinary layer of a deeper target; nothing here goes through the serving code.
    """

    def __init__(self, folder: Path, window: int) -> None:
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = AutoConfig.from_pretrained(folder)
        config.num_hidden_layers = DEPTH + 1
        deeper = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._layer, self._rotary = deeper.model.layers[DEPTH], deeper.model.rotary_emb
        self._own = {
            name.removeprefix(f"model.layers.{DEPTH}."): tensor
            for name, tensor in load_file(folder / WEIGHTS).items()
            if name.startswith(f"model.layers.{DEPTH}.")
        }
        self._eps = config.rms_norm_eps
        self._window = window

    @torch.inference_mode()
    def features(self, tokens: list[int], start: int, end: int) -> FeatureBlock:
        """What the target would send for positions [start, end): what its final norm gives."""
        states = self.network.model(torch.tensor([tokens])).last_hidden_state[0]
        rows = states[start:end].to(torch.bfloat16).contiguous()
        return FeatureBlock(start, rows.view(torch.uint8).numpy())

    @torch.inference_mode()
    def q(self, tokens: list[int], x: list[int], origin: int) -> NDArray[np.float32]:
        """As `tests.unit.heads.Reference.q`: rows from the window's start on, each a whole pass over all of them."""
        anchor = len(tokens) - 2
        lowest = max(origin, anchor + 1 - self._window)
        block = self.features(tokens, lowest, anchor + 1)
        hidden = torch.from_numpy(block.rows.copy()).view(torch.bfloat16).float()
        fed = tokens[lowest + 1 :]
        rows = []
        for token in x:
            output = self._pass(fed, hidden, lowest)
            fed, hidden = [*fed, token], torch.cat([hidden, output[-1:]])
            rows.append((output[-1] @ self._own["shared_head.head.weight"].T).softmax(-1).numpy())
        return np.stack(rows)

    def _pass(self, fed: list[int], hidden: Tensor, first: int) -> Tensor:
        """[rows, hidden] outputs of all rows, behind the layer's own norm."""
        embedded = self._own["embed_tokens.weight"][fed]
        parts = [self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")]
        mixed = (torch.cat(parts, dim=1) @ self._own["eh_proj.weight"].T)[None]
        positions = torch.arange(first, first + len(fed))[None]
        future = torch.ones(len(fed), len(fed), dtype=torch.bool).triu(1)
        mask = torch.zeros(future.shape).masked_fill_(future, torch.finfo(torch.float32).min)[None, None]
        out = self._layer(
            mixed,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self._rotary(mixed, positions),
        )
        return self._norm(out[0], "shared_head.norm")

    def _norm(self, states: Tensor, name: str) -> Tensor:
        scale = (states.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        return states * scale * self._own[f"{name}.weight"]
