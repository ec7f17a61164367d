"""Closed-form start of a head: least squares against what the target's output matrix reads.

Three fits, each on what the one before leaves: the two linear paths into the residual (features and the token's
embedding), the MLP's last matrix over its random hidden units, and the matrix that carries an output to the next step.
The attention starts silent. Minutes of training are saved: such a head stands where gradient steps get only after
hundreds of thousands of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.eagle3 import Eagle3Head
from outrider.training.held_out import is_held_out
from outrider.training.store import Store
from outrider.training.teacher import Lesson, Teacher
from outrider.training.unroll import Embed

_ROWS = 120_000
_RIDGE = 0.003


@dataclass(frozen=True, slots=True)
class FittingRows:
    """Rows of answers.

    Attributes:
        features: bfloat16 [rows, layers * hidden].
        next_ids: int64 [rows] the token behind each.
        finals: float32 [rows, hidden] what the target's output matrix reads at that token.
        followed: bool [rows] whether the next row is the next position of the same answer.
    """

    features: Tensor
    next_ids: Tensor
    finals: Tensor
    followed: Tensor


def fitting_rows(store: Store, teacher: Teacher, most: int = _ROWS) -> FittingRows:
    """Rows of the answers so far, evenly over the shards that are kept whole, without those held out."""
    paths = store.kept()
    lessons: list[Lesson] = []
    for path in paths:
        rows = 0
        for one in store.read(path, lambda place: not is_held_out(place)):
            if len(one.top_ids) < 3:
                continue
            lessons.append(one)
            rows += len(one.top_ids) - 1
            if rows >= most / len(paths):
                break
    features, next_ids, finals, followed = [], [], [], []
    for one in lessons:
        first, count = one.prompt_tokens - 1 - one.start, len(one.top_ids) - 1
        features.append(one.features[first : first + count])
        next_ids.append(one.ids[one.prompt_tokens :][:count].long())
        finals.append(teacher.finish(one)[first + 1 : first + 1 + count].float().cpu())
        followed.append(torch.arange(count) < count - 1)
    return FittingRows(torch.cat(features), torch.cat(next_ids), torch.cat(finals), torch.cat(followed))


@torch.no_grad()
def fit_start(head: Eagle3Head, embed: Embed, scale: Tensor, rows: FittingRows) -> None:
    """Sets the linear paths and the MLP of a `direct` head whose last norm and output matrix are the target's.

    Args:
        head: On the CPU.
        embed: The target's embedding.
        scale: [layers * hidden] factors of the features.
        rows: What to fit; too few (fewer than there are inputs) leave the head as it is.
    """
    layer = head.midlayer
    width = head.fc.in_features
    if not head.config.direct or len(rows.next_ids) < width or rows.finals.shape[1] != head.config.hidden:
        return
    # The last norm takes any length: rows of length one are what it makes of them before its weight.
    weight = head.norm.weight
    wanted = rows.finals / torch.where(weight.abs() < 1e-3, torch.ones_like(weight), weight)
    token: Tensor = layer.input_layernorm(embed(rows.next_ids).float().cpu())
    inputs = torch.cat([rows.features.float() * scale, token], 1)
    paths = _least_squares(inputs, wanted)
    head.fc.weight.copy_(paths[:width].T)
    assert layer.embed_proj is not None
    layer.embed_proj.weight.copy_(paths[width:].T)
    layer.self_attn.o_proj.weight.zero_()
    guess = inputs @ paths
    normed = layer.post_attention_layernorm(guess)
    units = F.silu(layer.mlp.gate_proj(normed)) * layer.mlp.up_proj(normed)
    down = _least_squares(units, wanted - guess)
    layer.mlp.down_proj.weight.copy_(down.T)
    output = guess + units @ down
    before = rows.followed.nonzero()[:, 0]
    left = wanted[before + 1] - token[before + 1] @ paths[width:]
    assert isinstance(head.carry, torch.nn.Linear)
    head.carry.weight.copy_(_least_squares(output[before], left).T)


def _least_squares(x: Tensor, y: Tensor) -> Tensor:
    """[inputs, outputs] weights; the ridge is relative to the inputs' size."""
    gram = x.T @ x
    gram.diagonal().add_(_RIDGE * float(gram.diagonal().mean()))
    solved: Tensor = torch.linalg.solve(gram, x.T @ y)
    return solved
