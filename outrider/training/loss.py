"""Cross-entropy and acceptance against a sparse target, without a second matrix of logits.

The gradient of both with respect to the logits of a row is *q times a factor of the row, minus something at the
target's kept ids*. So it is made in place of q in the forward pass, in the dtype of the matrix product, and nothing as
large as the logits is kept in float32 or passed over twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LEAST = 1e-9


class SparseLoss(torch.autograd.Function):
    """Loss, alpha and likeliest id of rows: see `sparse_loss`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, p: Tensor, acceptance_share: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q = (hidden @ weight.T).softmax(1)
        known = ids >= 0
        places = ids.clamp(min=0)
        p = p * known
        q_top = q.gather(1, places).float() * known
        below = q_top * (q_top < p)
        alpha = torch.minimum(p, q_top).sum(1)
        entropy = -(p * q_top.clamp(min=_LEAST).log()).sum(1)
        loss = (1 - acceptance_share) * entropy - acceptance_share * alpha.clamp(min=_LEAST).log()
        if not ctx.needs_input_grad[0]:
            return loss.mean(), alpha, q.argmax(1)
        scale = 1 / len(hidden)
        safe = alpha.clamp(min=_LEAST)[:, None]
        factor = (1 - acceptance_share) * p.sum(1, keepdim=True) + acceptance_share * below.sum(1, keepdim=True) / safe
        taken = (1 - acceptance_share) * p + acceptance_share * below / safe
        gradient = q.mul_((factor * scale).to(q.dtype))
        gradient.scatter_add_(1, places, (taken * -scale).to(q.dtype))
        ctx.save_for_backward(gradient, hidden, weight)
        likeliest = torch.empty(0, dtype=torch.int64, device=q.device)
        ctx.mark_non_differentiable(alpha, likeliest)
        return loss.mean(), alpha, likeliest

    @staticmethod
    def backward(ctx: Any, *of: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradient, hidden, weight = ctx.saved_tensors
        by = of[0].to(hidden.dtype)
        of_weight = (gradient.T @ hidden) * by if ctx.needs_input_grad[1] else None
        return (gradient @ weight) * by, of_weight, None, None, None


def sparse_loss(
    hidden: Tensor, weight: Tensor, ids: Tensor, p: Tensor, acceptance_share: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of rows whose logits are hidden @ weight.T against the target's likeliest ids.

    Ids that the draft lacks or that lie behind the kept ones are left out: what q puts on them would be lost.

    Args:
        hidden: [rows, width].
        weight: [draft ids, width], of the same dtype.
        ids: int64 [rows, k] draft ids of the target's likeliest tokens, -1 where the draft has none.
        p: float32 [rows, k] their probabilities.
        acceptance_share: Weight of -log(alpha) in the loss; the rest is the cross-entropy.

    Returns:
        The mean loss; alpha [rows], the sum over the kept ids of min(p, q); the likeliest draft id [rows] (empty when
        gradients are recorded, for it costs as much as a softmax).
    """
    if not torch.is_grad_enabled():  # a parameter says that it needs gradients even then
        hidden, weight = hidden.detach(), weight.detach()
    result: tuple[Tensor, Tensor, Tensor] = SparseLoss.apply(hidden, weight, ids, p, acceptance_share)
    return result
