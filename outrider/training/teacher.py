"""The target as a teacher: answers whole batches of prompts and records what its pass computes on the way.

Answers, features and distributions come out of the same passes, so nothing is computed twice: the hidden states of the
fused layers are hooked, and of every row of logits the top k probabilities are kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

from outrider.training.buffered_attention import IMPLEMENTATION, GrowingLayer, register
from outrider.training.flight import Asked, Flight, Notes

FEATURE_WINDOW = 64
"""Positions at the end of a prompt that have features, here as in serving."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A prompt with its answer, and what the target computed along it.

    Position t stands for the pass that read token t. `start` is the first position with a feature: at most
    `feature_window` positions of the prompt have one, as in serving.

    Attributes:
        ids: int32 [tokens], prompt and answer.
        prompt_tokens: How many of them are the prompt.
        start: First position with a feature.
        features: bfloat16 [tokens - start, layers * hidden]; the fused layers side by side, low to high.
        top_ids: int32 [answer, k]; the likeliest ids behind each position from `prompt_tokens` - 1 on.
        top_probs: float16 [answer, k]; their probabilities at temperature 1. What is missing from 1 is the rest.
    """

    ids: Tensor
    prompt_tokens: int
    start: int
    features: Tensor
    top_ids: Tensor
    top_probs: Tensor


class Teacher:
    """A target that answers in batches; not thread-safe."""

    def __init__(
        self, network: Any, layers: Sequence[int], *, top_k: int = 64, feature_window: int = FEATURE_WINDOW
    ) -> None:
        """Hooks a loaded model.

        Args:
            network: A transformers causal LM.
            layers: Indices of decoder layers whose *input* is a feature (a layer's index = how many ran before it).
            top_k: Probabilities kept per position.
            feature_window: Positions at the end of a prompt whose features are kept.
        """
        register()
        self.network = network.eval()
        self.network.set_attn_implementation(IMPLEMENTATION)
        self.top_k = top_k
        self.feature_window = feature_window
        self.layers = tuple(layers)
        self._seen: dict[int, Tensor] = {}
        decoder = network.get_decoder()
        self._cache_argument = _cache_argument(decoder)
        for index in self.layers:
            decoder.layers[index].register_forward_pre_hook(self._keep(index), with_kwargs=True)

    @classmethod
    def load(
        cls, folder: str, layers: Sequence[int], dtype: torch.dtype, device: str = "cpu", **options: int
    ) -> Teacher:
        """Loads a model folder."""
        network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return cls(network.to(device), layers, **options)

    @torch.inference_mode()
    def answer(
        self, asked: Sequence[Asked], *, max_tokens: int, stop_ids: frozenset[int], generator: torch.Generator
    ) -> list[Lesson]:
        """Answers a batch of prompts.

        The batch ends when nearly all answers have; the few that have not are cut there.

        Args:
            asked: The prompts; the nearer in length, the less padding is computed.
            max_tokens: Longest answer.
            stop_ids: Ids that end an answer (they are part of it).
            generator: Source of the draws.
        """
        flight = Flight(asked, max_tokens, self.network.device)
        for turn in range(max_tokens + 1):
            hidden = self._decode(flight.ids, flight.mask, flight.positions, flight.cache)
            flight.passed(self._features(), self.feature_window, stop_ids)
            if turn == max_tokens or flight.nearly_all_ended:
                break
            logits = self.network.get_output_embeddings()(hidden[:, -1]).float()
            flight.draw(logits, self.top_k, generator)
        return [self._lesson(one, note) for one, note in zip(asked, flight.notes, strict=True)]

    @torch.inference_mode()
    def read(self, ids: Sequence[int], prompt_tokens: int) -> Lesson:
        """The same record for an answer that exists: one pass over prompt and answer."""
        tokens = torch.tensor([list(ids)], device=self.network.device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        positions = torch.arange(len(ids), device=tokens.device)[None]
        hidden = self._decode(tokens, mask, positions, Cache(layer_class_to_replicate=GrowingLayer))
        start = max(0, prompt_tokens - self.feature_window)
        logits = self.network.get_output_embeddings()(hidden[0, prompt_tokens - 1 : -1]).float()
        top = logits.topk(self.top_k, dim=-1)
        return Lesson(
            ids=tokens[0].int().cpu(),
            prompt_tokens=prompt_tokens,
            start=start,
            features=self._features()[0, start:].bfloat16().cpu(),
            top_ids=top.indices.int().cpu(),
            top_probs=(top.values - logits.logsumexp(-1, keepdim=True)).exp().half().cpu(),
        )

    @torch.inference_mode()
    def finish(self, one: Lesson) -> Tensor:
        """[tokens - start, hidden]: what the output matrix reads at each position that has a feature.

        Only the layers from the highest feature on run once more. They see nothing before `start`, as the draft.
        """
        decoder, device = self.network.get_decoder(), self.network.device
        layers = decoder.layers
        high = one.features[:, -(one.features.shape[1] // len(self.layers)) :].to(device, self.network.dtype)
        positions = torch.arange(one.start, one.start + len(high), device=device)
        decoder.layers = layers[self.layers[-1] :]
        try:
            out = decoder(inputs_embeds=high[None], position_ids=positions[None], use_cache=False)
        finally:
            decoder.layers = layers
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _decode(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        out = self.network.get_decoder()(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{self._cache_argument: cache}
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _features(self) -> Tensor:
        return torch.cat([self._seen[index] for index in self.layers], dim=-1)

    def _keep(self, index: int) -> Callable[..., None]:
        def keep(_: Any, arguments: tuple[Tensor, ...], named: dict[str, Any]) -> None:
            self._seen[index] = arguments[0] if arguments else named["hidden_states"]

        return keep

    def _lesson(self, one: Asked, note: Notes) -> Lesson:
        return Lesson(
            ids=torch.tensor([*one.ids, *note.ids], dtype=torch.int32),
            prompt_tokens=len(one.ids),
            start=max(0, len(one.ids) - self.feature_window),
            features=torch.cat(note.features).bfloat16().cpu(),
            top_ids=torch.stack(note.top_ids),
            top_probs=torch.stack(note.top_probs),
        )


def _cache_argument(decoder: Any) -> str:
    """`cache`, or `past_key_values` in transformers before 5.20."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
