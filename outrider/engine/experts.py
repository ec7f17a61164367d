"""Mixture-of-experts layers whose results do not depend on how many rows chose the same expert.

Registered through transformers' `ExpertsInterface`. How many rows an expert gets depends on the batch, so each
expert's rows are padded to counts at which a row's bits stay the same, and a row's experts are summed in one order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.moe import ExpertsInterface

from outrider.engine.batch import RowRule

IMPLEMENTATION = "outrider_padded"

CPU_RULE = RowRule(4, 4)
CUDA_RULE = RowRule(16, 16)


def register() -> None:
    """Makes the function known to transformers; harmless when repeated."""
    ExpertsInterface.register(IMPLEMENTATION, padded_experts)


def padded_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Applies to each row the experts chosen for it.

    Args:
        module: The experts module; holds the weights stacked over experts.
        hidden_states: [rows, hidden].
        top_k_index: [rows, k] experts.
        top_k_weights: [rows, k].

    Returns:
        [rows, hidden].
    """
    rows, chosen = top_k_index.shape
    rule = CUDA_RULE if hidden_states.is_cuda else CPU_RULE
    experts = top_k_index.reshape(-1)
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=module.num_experts).tolist()
    results = hidden_states.new_empty((rows * chosen, hidden_states.shape[1]))
    first = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        pairs = order[first : first + count]
        first += count
        padded = torch.cat([pairs, pairs[:1].expand(rule.pad(count) - count)])
        out = _expert(module, expert, hidden_states[padded // chosen])
        results[pairs] = out[:count]
    weighted = results.view(rows, chosen, -1) * top_k_weights[..., None].to(results.dtype)
    return weighted.sum(1)


def _expert(module: Any, expert: int, states: Tensor) -> Tensor:
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _linear(module, name, expert, states)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    return _linear(module, "down_proj", expert, inner)


def _linear(module: Any, name: str, expert: int, states: Tensor) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return F.linear(states, weight.T if module.is_transposed else weight, bias)
