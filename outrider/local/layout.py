"""Who sits where: the plan that `outrider up` prints before it downloads or starts anything."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import DoesNotFit
from outrider.local.devices import Card, pick

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_LEAST_KV_TOKENS = 2048
"""A side that cannot cache at least one long request beside its weights does not fit."""
_WORKSPACE = 1.05
"""Weights times this: allocator slack and activations, checked again by the service when it has loaded."""
_GPU_SHARE = 0.9
_CPU_SHARE = 0.8
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model needs: bytes of weights, and bytes of KV per token (0 for a model without either)."""

    weights_bytes: int = 0
    kv_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class Seat:
    """One part's place.

    Attributes:
        role: "target" or "draft".
        cards: its GPUs, or None for the CPU.
        cpus: cores it may use on the CPU, or None for all.
        shared: whether it shares its device with the other part for want of another.
        kv_tokens: tokens whose KV fits beside the weights, or None where there is no KV.
    """

    role: str
    model: str
    cards: tuple[Card, ...] | None
    cpus: tuple[int, ...] | None
    footprint: Footprint
    kv_tokens: int | None
    shared: bool

    @property
    def device(self) -> str:
        """The device as the service's `--device` takes it: it is shown its own cards only, and spreads over several."""
        if self.cards is None:
            return "cpu"
        return "cuda:0" if len(self.cards) == 1 else "auto"

    def describe(self) -> str:
        if self.cards is None:
            cores = "all cores" if self.cpus is None else f"core {', '.join(map(str, self.cpus))}"
            return f"CPU, {cores}"
        return " + ".join(f"GPU {card.index} ({card.name})" for card in self.cards)


def footprint(config: Mapping[str, Any], stored_bytes: int, dtype: str) -> Footprint:
    """From a Hugging Face `config.json` and the size of the weight files.

    KV per token = 2 x layers x KV heads x head size x bytes per element.
    """
    text = config.get("text_config", config)
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 1)
    hidden = int(text.get("hidden_size") or text.get("n_embd") or 0)
    layers = int(text.get("num_hidden_layers") or text.get("n_layer") or 0)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_size = int(text.get("head_dim") or hidden // heads)
    stored = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    served = stored if dtype == "auto" else dtype
    quantised = "quantization_config" in config
    scale = 1.0 if quantised else _BYTES.get(served, 2) / _BYTES.get(stored, 2)
    return Footprint(int(stored_bytes * scale), 2 * layers * kv_heads * head_size * _BYTES.get(served, 2))


def plan(
    *,
    target: str,
    target_footprint: Footprint,
    draft: str | None,
    draft_footprint: Footprint,
    target_device: str,
    draft_device: str,
    available: Sequence[Card],
    cpu_free_bytes: int,
    cores: int,
) -> tuple[Seat, ...]:
    """Seats for the target and, if there is one, the draft.

    `auto` gives the target the card with most free memory that fits it and the draft the smallest other that fits it;
    else they share. Without cards, or with `cpu`, the target gets all cores and a draft with weights one pinned core.

    Raises:
        DoesNotFit: a side has no room; the message holds needed and free sizes.
        InvalidArgument: a named device does not exist.
    """
    target_cards = _choose("target", target, target_device, target_footprint, available, ())
    taken = target_cards or ()
    seats = [_seat("target", target, target_cards, None, target_footprint, cpu_free_bytes, shared_with=Footprint())]
    if draft is not None:
        weighty = draft_footprint.weights_bytes > 0
        draft_cards = _choose("draft", draft, draft_device if weighty else "cpu", draft_footprint, available, taken)
        pinned = (cores - 1,) if draft_cards is None and weighty and target_cards is None and cores > 1 else None
        both_on_cpu = draft_cards is None and target_cards is None
        shares = weighty and (both_on_cpu or bool(set(draft_cards or ()) & set(taken)))
        beside = target_footprint if shares else Footprint()
        seats.append(_seat("draft", draft, draft_cards, pinned, draft_footprint, cpu_free_bytes, shared_with=beside))
    return tuple(seats)


def _choose(
    role: str, model: str, wanted: str, need: Footprint, available: Sequence[Card], taken: Sequence[Card]
) -> tuple[Card, ...] | None:
    if wanted != "auto":
        return pick(f"{role}-device", wanted, available)
    if not available:
        return None
    fitting = [card for card in available if card.free_bytes * _GPU_SHARE >= _needed_bytes(need)]
    others = [card for card in fitting if card not in taken]
    if role == "target":
        if not fitting:
            largest = max(available, key=lambda card: card.free_bytes)
            raise DoesNotFit(_shortage(role, model, need, f"GPU {largest.index}", largest.free_bytes))
        return (max(fitting, key=lambda card: card.free_bytes),)
    if others:
        return (min(others, key=lambda card: card.free_bytes),)
    return tuple(taken)[:1] or (max(available, key=lambda card: card.free_bytes),)


def _seat(
    role: str,
    model: str,
    cards: tuple[Card, ...] | None,
    cpus: tuple[int, ...] | None,
    need: Footprint,
    cpu_free_bytes: int,
    *,
    shared_with: Footprint,
) -> Seat:
    free = cpu_free_bytes * _CPU_SHARE if cards is None else sum(card.free_bytes for card in cards) * _GPU_SHARE
    free -= _needed_bytes(shared_with) if shared_with.weights_bytes else 0
    if free < _needed_bytes(need):
        place = "the CPU's memory" if cards is None else " + ".join(f"GPU {card.index}" for card in cards)
        raise DoesNotFit(_shortage(role, model, need, place, int(max(free, 0))))
    room = int((free - need.weights_bytes * _WORKSPACE) // need.kv_bytes_per_token) if need.kv_bytes_per_token else None
    return Seat(role, model, cards, cpus, need, room, shared=shared_with.weights_bytes > 0)


def _needed_bytes(need: Footprint) -> int:
    return int(need.weights_bytes * _WORKSPACE) + _LEAST_KV_TOKENS * need.kv_bytes_per_token


def _shortage(role: str, model: str, need: Footprint, place: str, free: int) -> str:
    return (
        f"{role} {model} does not fit on {place}: {need.weights_bytes / GIB:.2f} GiB of weights and "
        f"{_LEAST_KV_TOKENS * need.kv_bytes_per_token / GIB:.2f} GiB of KV for {_LEAST_KV_TOKENS} tokens are needed, "
        f"{free / GIB:.2f} GiB may be used; name another device, several (0,1), or a smaller model"
    )


def cpu_free_bytes() -> int:
    """Memory that can be had without swapping, from /proc/meminfo."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
