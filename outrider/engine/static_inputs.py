"""The fixed device memory that captured steps read, and how a batch gets into it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batch import RaggedBatch
from outrider.engine.layout import SLOTS
from outrider.engine.varlen import LENGTHS, Lengths


class View(NamedTuple):
    """The first rows of the inputs.

    Attributes:
        ids, positions: [1, rows].
        wanted: [rows] rows whose logits are wanted.
        batch: stands for the batch at attention layers, which find there what they would derive from one.
    """

    ids: Tensor
    positions: Tensor
    wanted: Tensor
    batch: RaggedBatch


class StaticInputs:
    """Ids, positions, KV slots, and the lengths and page tables of as many sequences as there are rows.

    Every padding row is a sequence of its own that sees the scratch block's first key; sequences beyond that are empty,
    which the kernel skips. On a GPU the values pass through pinned memory.
    """

    def __init__(self, rows: int, pages: int, block_size: int, scratch_block: int, device: torch.device) -> None:
        """
        Args:
            rows: of the largest step.
            pages: blocks of the longest stream.
            block_size: tokens per block.
            scratch_block: where padding rows write and look.
            device: of the model.
        """
        self._rows, self._pages, self._block_size, self._scratch = rows, pages, block_size, scratch_block
        self._device = device
        pinned = device.type == "cuda"
        self._wide = torch.zeros((4, rows), dtype=torch.int64, device=device)
        self._wide_host = torch.zeros((4, rows), dtype=torch.int64, pin_memory=pinned)
        self._running = torch.zeros((2, rows + 1), dtype=torch.int32, device=device)
        self._running_host = torch.zeros((2, rows + 1), dtype=torch.int32, pin_memory=pinned)
        self._keys = torch.zeros(rows, dtype=torch.int32, device=device)
        self._keys_host = torch.zeros(rows, dtype=torch.int32, pin_memory=pinned)
        self._table = torch.full((rows, pages), scratch_block, dtype=torch.int32, device=device)
        self._table_host = torch.full((rows, pages), scratch_block, dtype=torch.int32, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None
        self.clear()

    def clear(self) -> None:
        """Puts padding everywhere."""
        self._wide.zero_()
        self._wide[2].fill_(self._scratch * self._block_size)
        self._running.copy_(torch.arange(self._rows + 1, dtype=torch.int32).expand(2, -1))
        self._keys.fill_(1)
        self._table.fill_(self._scratch)

    def of(self, rows: int, queries: int) -> View:
        """What a step of so many rows reads, at most so many of them in a sequence."""
        ids, positions, slots, wanted = (row[:rows] for row in self._wide)
        lengths = Lengths(
            self._running[0, : rows + 1],
            self._running[1, : rows + 1],
            self._keys[:rows],
            self._table[:rows],
            queries,
            self._pages * self._block_size,
        )
        nothing = np.empty(0, dtype=np.int64)
        batch = RaggedBatch(
            spans=(),
            block_size=self._block_size,
            scratch_block=self._scratch,
            tokens=rows,
            rows=rows,
            ids=nothing,
            positions=nothing,
            slots=nothing,
            new_blocks=[],
            wanted=nothing,
            wanted_count=rows,
            layouts={(SLOTS, self._device): slots, (LENGTHS, self._device): lengths},
        )
        return View(ids[None], positions[None], wanted, batch)

    def fill(self, batch: RaggedBatch) -> None:
        """Sends a batch's values; returns before they have arrived.

        Args:
            batch: of a size that `of` was asked for, with at least one wanted row.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the pinned memory may still be read for the step before
        rows, streams, padding = batch.rows, len(batch.spans), batch.rows - batch.tokens
        wide = self._wide_host.numpy()
        wide[0, :rows], wide[1, :rows], wide[2, :rows] = batch.ids, batch.positions, batch.slots
        wide[3, :rows] = batch.wanted[0]
        wide[3, : batch.wanted_count] = batch.wanted[: batch.wanted_count]
        queries, keys = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        table = self._table_host.numpy()
        for index, span in enumerate(batch.spans):
            queries[index] = len(span.tokens)
            keys[index] = span.start - span.dropped + len(span.tokens)
            used = -(-int(keys[index]) // self._block_size)
            table[index, :used] = span.blocks[:used]
            table[index, used:] = self._scratch
        sequences = streams + padding
        queries[streams:sequences] = keys[streams:sequences] = 1
        table[streams:sequences] = self._scratch
        running = self._running_host.numpy()
        running[0, 1 : rows + 1], running[1, 1 : rows + 1] = np.cumsum(queries), np.cumsum(keys)
        self._keys_host.numpy()[:rows] = keys
        for target, source in (
            (self._wide, self._wide_host),
            (self._running, self._running_host),
            (self._keys, self._keys_host),
            (self._table[:sequences], self._table_host[:sequences]),
        ):
            target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
