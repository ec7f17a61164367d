"""Cards by name: memory, bandwidth and speed as their makers publish them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class CardData:
    """One card. Makers quote decimal gigabytes, and tensor speed often with sparsity; here it is dense.

    Attributes:
        memory_bytes: of the card.
        bytes_per_s: memory bandwidth.
        flops: dense bf16 (float16 where there is no bf16) operations per second.
    """

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops: float


def _card(name: str, memory_gb: float, bandwidth_gb_s: float, tflops: float) -> CardData:
    return CardData(name, memory_gb * 1e9, bandwidth_gb_s * 1e9, tflops * 1e12)


CARDS: Mapping[str, CardData] = {
    card.name: card
    for card in (
        _card("B200", 180, 8000, 2250),  # NVIDIA DGX B200 datasheet, an eighth of the system
        _card("H200", 141, 4800, 989),  # NVIDIA H200 datasheet, SXM; half of the speed with sparsity
        _card("H100", 80, 3350, 989),  # NVIDIA H100 datasheet, SXM; half of the speed with sparsity
        _card("H100-PCIE", 80, 2000, 756),  # NVIDIA H100 PCIe product brief
        _card("H100-NVL", 94, 3938, 835),  # NVIDIA H100 NVL product brief
        _card("A100", 80, 2039, 312),  # NVIDIA A100 datasheet, SXM 80 GB
        _card("A100-40GB", 40, 1555, 312),  # NVIDIA A100 datasheet, 40 GB
        _card("L40S", 48, 864, 362),  # NVIDIA L40S datasheet
        _card("A6000", 48, 768, 155),  # NVIDIA RTX A6000 datasheet; half of the speed with sparsity
        _card("RTX5090", 32, 1792, 210),  # NVIDIA RTX Blackwell architecture paper, bf16 with fp32 accumulation
        _card("RTX4090", 24, 1008, 165),  # NVIDIA Ada architecture paper, bf16 with fp32 accumulation
        _card("RTX3090", 24, 936, 71),  # NVIDIA GA102 architecture paper, bf16 with fp32 accumulation
        _card("L4", 24, 300, 121),  # NVIDIA L4 datasheet; half of the speed with sparsity
        _card("A10", 24, 600, 125),  # NVIDIA A10 datasheet
        _card("T4", 16, 320, 65),  # NVIDIA T4 datasheet; float16, the card has no bf16
    )
}


def find(field: str, name: str) -> CardData:
    """A card by name, or `NAME:memory_gb:bandwidth_gb_s:tflops` for one that is not listed.

    Raises:
        InvalidArgument: unknown; the message lists the names.
    """
    own, *numbers = name.split(":")
    if numbers:
        try:
            memory, bandwidth, tflops = (float(number) for number in numbers)
        except ValueError:
            memory = bandwidth = tflops = -1.0
        if not min(memory, bandwidth, tflops) > 0:
            raise InvalidArgument(field, f"{name!r} is not NAME:memory_gb:bandwidth_gb_s:tflops")
        return _card(own, memory, bandwidth, tflops)
    wanted = re.sub(r"[\s_-]|NVIDIA|GEFORCE", "", own.upper())
    for card in CARDS.values():
        if re.sub(r"[\s_-]", "", card.name.upper()) == wanted:
            return card
    raise InvalidArgument(
        field, f"no card {name!r}; there are {', '.join(CARDS)}, or NAME:memory_gb:bandwidth_gb_s:tflops"
    )
