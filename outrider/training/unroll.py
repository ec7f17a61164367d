"""The head unrolled over several steps on its own hidden states ("training-time test", EAGLE-3, section 3.2).

In serving, row r of step k has seen true features up to its own position only; behind that it stands on k hidden states
and keys of the head itself. So in training every row of a batch is unrolled like that at once: step 0 attends causally
over true features; step k attends over the same keys of step 0 up to its own row, and over the k keys that this very
row has made since. The tokens it is fed are the answer's, for only accepted tokens are followed by further ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.eagle3 import Eagle3Head
from outrider.training.batches import Batch
from outrider.training.loss import sparse_loss

Embed = Callable[[Tensor], Tensor]


class Step(NamedTuple):
    """One unrolled step over the rows that reach it.

    Attributes:
        loss: scalar, the mean over rows of the loss against the target.
        alpha: [rows] sum over ids of min(p, q) at temperature 1 (the target's likeliest ids only: a lower bound).
        match: bool [rows] whether the likeliest id is the answer's; empty while gradients are recorded.
        lessons: int64 [rows] the lesson of each row.
        anchors: int64 [rows] the row of step 0 it stands on.
    """

    loss: Tensor
    alpha: Tensor
    match: Tensor
    lessons: Tensor
    anchors: Tensor


class Unroll:
    """Runs a head over batches.

    Args:
        head: The head.
        embed: The target's embedding.
        feature_scale: [layers * hidden] factors that bring every feature to unit size. The target's hidden states
            differ a thousandfold between dimensions, which no learning rate suits; `fold` moves them into `fc`.
    """

    def __init__(self, head: Eagle3Head, embed: Embed, feature_scale: Tensor) -> None:
        self._head = head
        self._embed = embed
        self._scale = feature_scale.to(torch.bfloat16)
        config = head.config
        # Draft id of each target id, -1 where the head has none.
        self._draft_ids = torch.full((config.vocab,), -1, device=head.target_ids.device)
        self._draft_ids[head.target_ids] = torch.arange(config.draft_vocab, device=head.target_ids.device)

    def __call__(self, batch: Batch, steps: int, thinning: float = 1.0, acceptance_share: float = 0.0) -> list[Step]:
        """Unrolls a batch over `steps` steps.

        Args:
            batch: The batch.
            steps: Drafted positions.
            thinning: Share of the lessons that go on from each step to the next, at random. Positions far out are
                reached by few rounds in serving, so most of the work goes to the first ones; whole lessons, because
                attention is computed for whole ones.
            acceptance_share: See `sparse_loss`.
        """
        head = self._head
        weight = head.lm_head.weight
        device = batch.rows.device
        width = int(batch.rows.max())
        index = torch.arange(width, device=device)
        lessons, anchors = (index < batch.rows[:, None]).nonzero(as_tuple=True)
        places = batch.offsets[lessons] + anchors
        keys = _Keys(batch, head.config.window, head.config.kv_heads)
        fused = head.fuse((batch.features * self._scale).to(head.fc.weight.dtype))
        embedded = self._embed(batch.next_ids)
        prompts = (torch.arange(fused.shape[1], device=device) < batch.offsets[:, None]).nonzero(as_tuple=True)
        keys.add_prompts(prompts, *head.key_value(embedded[prompts], fused[prompts], prompts[1]))
        hidden = fused[lessons, places]
        done = []
        for step in range(steps):
            if step:
                kept = anchors < batch.rows[lessons] - step
                if thinning < 1:
                    kept &= keys.thin(thinning)[lessons]
                if not kept.any():
                    break
                lessons, anchors, hidden = lessons[kept], anchors[kept], head.carry(hidden[kept])
                keys.keep(kept)
            keys.rows = lessons, anchors
            tokens = batch.answer[lessons, anchors + step]
            positions = batch.offsets[lessons] + anchors + step
            hidden = head(self._embed(tokens), hidden, positions, keys.attend)
            target = lessons, anchors + step + 1
            top_ids, normed = batch.top_ids[target], head.norm(hidden)
            weight = weight.to(normed.dtype)
            ids, p = self._draft_ids[top_ids], batch.top_probs[target]
            loss, alpha, likeliest = sparse_loss(normed, weight, ids, p, acceptance_share)
            match = head.target_ids[likeliest] == batch.answer[target][: len(likeliest)]
            done.append(Step(loss, alpha, match, lessons, anchors))
        return done


class _Keys:
    """Keys and values of step 0 for all, and of the further steps for each row's own chain."""

    def __init__(self, batch: Batch, window: int | None, kv_heads: int) -> None:
        self._kv_heads = kv_heads
        self._lessons, self._length = batch.next_ids.shape
        self._width = int(batch.rows.max())
        place = torch.arange(self._length, device=batch.rows.device)
        row = batch.offsets[:, None, None] + torch.arange(self._width, device=batch.rows.device)[:, None]
        visible = place <= row
        if window is not None:
            visible &= place > row - window
        self._visible = visible
        self._offsets = batch.offsets
        self._alive: Tensor = torch.arange(self._lessons, device=batch.rows.device)
        self._seat = self._alive
        self._first: tuple[Tensor, Tensor] | None = None
        self._chain: list[tuple[Tensor, Tensor]] = []
        self.rows: tuple[Tensor, Tensor]

    def add_prompts(self, places: tuple[Tensor, ...], key: Tensor, value: Tensor) -> None:
        """Takes the keys of positions in prompts, which attend to nothing themselves."""
        self._prompts = places
        self._prompt_states = key, value

    def thin(self, share: float) -> Tensor:
        """bool [lessons] which lessons go on: a share of those that do, at random, one at least."""
        count = max(1, round(share * len(self._alive)))
        chosen = torch.randperm(len(self._alive), device=self._alive.device)[:count]
        assert self._first is not None
        self._alive, self._visible = self._alive[chosen], self._visible[chosen]
        self._first = self._first[0][chosen], self._first[1][chosen]
        self._seat = torch.full_like(self._seat, -1)
        self._seat[self._alive] = torch.arange(count, device=self._alive.device)
        return self._seat >= 0

    def keep(self, kept: Tensor) -> None:
        """Drops the chains of rows that end."""
        self._chain = [(key[kept], value[kept]) for key, value in self._chain]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `Eagle3Head.forward` wants it; the first call is step 0."""
        if self._first is None:
            self._first = self._scatter(key, 0), self._scatter(value, 1)
        else:
            self._chain.append((key, value))
        anchors = self.rows[1]
        seats, count = self._seat[self.rows[0]], len(self._alive)
        rows, heads, width = query.shape
        group = heads // self._kv_heads
        keys, values = self._first
        # [lessons, kv_heads, width * group, head_dim]: the query heads of a KV head are more rows of it.
        padded = query.new_zeros(count, self._width, self._kv_heads, group, width)
        padded[seats, anchors] = (query * width**-0.5).view(rows, self._kv_heads, group, width)
        folded = padded.transpose(1, 2).flatten(2, 3)
        scores = (folded @ keys.transpose(2, 3)).float().unflatten(2, (self._width, group))
        scores = scores.masked_fill(~self._visible[:, None, :, None], float("-inf"))
        if not self._chain:
            weights = scores.softmax(-1)
        else:
            grouped = query.view(rows, self._kv_heads, group, width) * width**-0.5
            own = torch.stack([(grouped * k[:, :, None]).sum(-1) for k, _ in self._chain], -1).float()
            columns = scores.new_zeros(count, self._width, self._kv_heads, group, own.shape[-1])
            columns[seats, anchors] = own
            weights = torch.cat([scores, columns.transpose(1, 2)], -1).softmax(-1)
        out = weights[..., : self._length].to(values.dtype).flatten(2, 3) @ values
        out = out.unflatten(2, (self._width, group)).transpose(1, 2)[seats, anchors]
        for number, (_, own_value) in enumerate(self._chain):
            weight = weights[..., self._length + number].transpose(1, 2)[seats, anchors]
            out = out + weight[..., None].to(out.dtype) * own_value[:, :, None]
        return out.reshape(rows, heads, width)

    def _scatter(self, own: Tensor, which: int) -> Tensor:
        """[lessons, kv_heads, N, head_dim] from the prompts' and the rows' own."""
        lessons, anchors = self.rows
        whole = own.new_zeros(self._lessons, self._length, *own.shape[1:])
        whole[lessons, self._offsets[lessons] + anchors] = own
        whole[self._prompts] = self._prompt_states[which].to(own.dtype)
        return whole.transpose(1, 2)
