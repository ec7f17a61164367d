"""Linear layers with weights laid out once the way oneDNN's kernels read them.

Eager torch hands its kernels plain row-major weights in every call. In the blocked layout, which `torch.compile` uses
too, a pass over few rows runs at up to twice the memory bandwidth. In bfloat16 it gives the same bits; in float32 it
gives those of oneDNN instead of MKL, whatever the row count, so that a plain step needs no padding.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

# The row count the layout is asked for; layouts for 1, 8 and 64 rows turned out the same.
HINT_ROWS = 8
CHECK_ROWS = 4
TOLERANCE = 0.02


class PackedLinear(nn.Module):
    """A linear layer in oneDNN's own weight layout.

    Attributes:
        in_features, out_features: As in `nn.Linear`.
        weight: Empty; keeps dtype and device visible to code that asks.
        packed: The weights.
        bias: [out_features], or None.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        self.bias = linear.bias
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), HINT_ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if torch.compiler.is_compiling():
            return torch.ops.outrider.linear(rows, self.outrider_number, self.out_features)  # type: ignore[no-any-return]
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch, on this processor, has the packed kernels for a type and device."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) and _processor_packs(dtype)


@functools.cache
def _processor_packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        # In bfloat16 oneDNN refuses processors without AVX-512 or AVX-NE-CONVERT here, and only trying tells.
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros((16, 16), dtype=dtype), HINT_ROWS)
    except (RuntimeError, AttributeError):
        return False
    return True


def all_packed(network: nn.Module) -> bool:
    """Whether a network has linear layers and all of them are packed."""
    kinds = {type(module) for module in network.modules()}
    return PackedLinear in kinds and nn.Linear not in kinds


@torch.inference_mode()
def pack_linears(network: nn.Module) -> int:
    """Replaces linear layers in place, each after checking it against the original; returns how many."""
    packed = 0
    for parent in network.modules():
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight.dtype, child.weight.device):
                layer = PackedLinear(child)
                if not _agree(child, layer):
                    log.warning("packed weights of %d -> %d give other results; left as they were", *child.weight.shape)
                    continue
                setattr(parent, name, layer)
                packed += 1
    return packed


def _agree(linear: nn.Linear, packed: PackedLinear) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((1, CHECK_ROWS, linear.in_features), generator=generator).to(linear.weight.dtype)
    expected = linear(rows)
    return torch.allclose(packed(rows), expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().mean()))
