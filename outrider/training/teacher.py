"""The target as a teacher: answers whole batches of prompts and records what its pass computes on the way.

Answers, features and distributions come out of the same passes, so nothing is computed twice: the hidden states of the
fused layers are hooked, and of every row of logits the top k probabilities are kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "outrider_teacher"

FEATURE_WINDOW = 64
"""Positions at the end of a prompt that have features, here as in serving."""

_GROWTH_TOKENS = 64
_ENOUGH_ANSWERED = 0.92  # of a batch; waiting for the few longest answers costs whole passes
_WORTH_COMPACTING = 0.75


class Asked(NamedTuple):
    """One prompt to answer: its ids, and the temperature (0 is greedy)."""

    ids: Sequence[int]
    temperature: float


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
        AttentionInterface.register(IMPLEMENTATION, _attention)
        AttentionMaskInterface.register(IMPLEMENTATION, _mask)
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
        device = self.network.device
        longest = max(len(one.ids) for one in asked)
        ids = torch.zeros(len(asked), longest, dtype=torch.int64)
        mask = torch.zeros(len(asked), longest + max_tokens, dtype=torch.bool)
        for row, one in enumerate(asked):
            ids[row, longest - len(one.ids) :] = torch.tensor(one.ids)
            mask[row, longest - len(one.ids) :] = True
        ids, mask = ids.to(device), mask.to(device)
        temperatures = torch.tensor([one.temperature for one in asked], device=device)
        positions = (mask[:, :longest].cumsum(1) - 1).clamp(min=0)
        lengths = mask[:, :longest].sum(1)
        cache: Any = Cache(layer_class_to_replicate=_GrowingLayer)
        alive = list(range(len(asked)))
        notes = [_Notes() for _ in asked]
        length = longest
        for turn in range(max_tokens + 1):
            hidden = self._decode(ids, mask[:, :length], positions, cache)
            features = self._features()
            if turn == 0:
                for row, one in enumerate(asked):
                    notes[row].features.append(features[row, -min(self.feature_window, len(one.ids)) :].clone())
            else:
                for place, row in enumerate(alive):
                    if not notes[row].ended:
                        notes[row].features.append(features[place, -1:].clone())
            # The last token's pass was only for its feature.
            for row in alive:
                notes[row].ended = notes[row].ended or (bool(notes[row].ids) and notes[row].ids[-1] in stop_ids)
            going = [place for place, row in enumerate(alive) if not notes[row].ended]
            if turn == max_tokens or len(going) <= (1 - _ENOUGH_ANSWERED) * len(asked):
                break
            logits = self.network.get_output_embeddings()(hidden[:, -1]).float()
            top = logits.topk(self.top_k, dim=-1)
            top_probs = (top.values - logits.logsumexp(-1, keepdim=True)).exp()
            drawn = _draw(logits, temperatures, generator)
            for place in going:
                note = notes[alive[place]]
                note.ids.append(int(drawn[place]))
                note.top_ids.append(top.indices[place].int().cpu())
                note.top_probs.append(top_probs[place].half().cpu())
            if len(going) <= _WORTH_COMPACTING * len(alive):
                kept = torch.tensor(going, device=device)
                for layer in cache.layers:
                    layer.batch_select_indices(kept)
                mask, lengths, drawn, temperatures = mask[kept], lengths[kept], drawn[kept], temperatures[kept]
                alive = [alive[place] for place in going]
            ids, positions = drawn[:, None], lengths[:, None]
            lengths = lengths + 1
            length += 1
        return [self._lesson(one, note) for one, note in zip(asked, notes, strict=True)]

    @torch.inference_mode()
    def read(self, ids: Sequence[int], prompt_tokens: int) -> Lesson:
        """The same record for an answer that exists: one pass over prompt and answer."""
        tokens = torch.tensor([list(ids)], device=self.network.device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        positions = torch.arange(len(ids), device=tokens.device)[None]
        hidden = self._decode(tokens, mask, positions, Cache(layer_class_to_replicate=_GrowingLayer))
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

    def _lesson(self, one: Asked, note: _Notes) -> Lesson:
        return Lesson(
            ids=torch.tensor([*one.ids, *note.ids], dtype=torch.int32),
            prompt_tokens=len(one.ids),
            start=max(0, len(one.ids) - self.feature_window),
            features=torch.cat(note.features).bfloat16().cpu(),
            top_ids=torch.stack(note.top_ids),
            top_probs=torch.stack(note.top_probs),
        )


class _Notes:
    """What is collected for one answer while its batch runs."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.features: list[Tensor] = []
        self.top_ids: list[Tensor] = []
        self.top_probs: list[Tensor] = []
        self.ended = False


class _GrowingLayer(DynamicLayer):
    """Keys and values in a buffer that grows by blocks: appending a token copies that token only.

    When decoding, the attention is given the whole buffer, for matrix products over whole ones are several times
    faster than over slices; what lies behind the mask is zero.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        held = self.get_seq_length()
        new = key_states.shape[2]
        if not self._buffers or held + new > self._buffers[0].shape[2]:
            capacity = -(-(held + new) // _GROWTH_TOKENS) * _GROWTH_TOKENS
            self._buffers = [
                states.new_zeros(*states.shape[:2], capacity, states.shape[3]) for states in (key_states, value_states)
            ]
            if held:
                self._buffers[0][:, :, :held].copy_(self.keys)  # type: ignore[arg-type]
                self._buffers[1][:, :, :held].copy_(self.values)  # type: ignore[arg-type]
            self.is_initialized = True
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, held : held + new] = states
        self.keys, self.values = (buffer[:, :, : held + new] for buffer in self._buffers)
        return (self._buffers[0], self._buffers[1]) if new == 1 else (self.keys, self.values)

    def batch_select_indices(self, indices: Tensor) -> None:
        held = self.get_seq_length()
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self.keys, self.values = (buffer[:, :, :held] for buffer in self._buffers)


def _mask(*arguments: Any, **named: Any) -> Tensor | None:
    """transformers' own mask, always spelled out: the buffers are longer than what they hold."""
    return sdpa_mask(*arguments, **{**named, "allow_is_causal_skip": False})


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention that never repeats keys when decoding: the query heads of a KV head stand in as its query rows."""
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    if rows > 1:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=heads != kv_heads
        )
        return out.transpose(1, 2), None
    visible = F.pad(attention_mask, (0, key.shape[2] - attention_mask.shape[3]))
    folded = query.view(batch, kv_heads, heads // kv_heads, width)
    scores = (folded @ key.transpose(2, 3)).float() * scaling
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).to(value.dtype)
    return (weights @ value).reshape(batch, 1, heads, -1), None


def _cache_argument(decoder: Any) -> str:
    """`cache`, or `past_key_values` in transformers before 5.20."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


def _draw(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """[rows] ids by inverse CDF at each row's temperature; the argmax where that is 0."""
    drawn = logits.argmax(-1)
    warm = (temperatures > 0).nonzero()[:, 0]
    if len(warm):
        mass = (logits[warm] / temperatures[warm, None]).softmax(-1).cumsum(-1)
        draws = torch.rand(len(warm), 1, generator=generator, device=generator.device).to(mass.device)
        drawn[warm] = torch.searchsorted(mass, draws * mass[:, -1:], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return drawn
