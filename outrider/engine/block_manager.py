"""BlockManager: who owns which block of the KV pool.

A block table is the list of block ids of one stream; position t lives in block `table[t // block_size]`. The manager
never sees tensors. Every id is either free or in exactly one table, and only the manager edits tables.

    operation    | table                          | free list
    grow         | + blocks until tokens fit      | - those
    truncate     | - blocks behind the last token | + those
    release      | - all                          | + those
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from outrider.errors import Overloaded


class OutOfBlocks(Overloaded):
    """The pool has fewer free blocks than a stream needs to grow; nothing was taken."""


class BlockManager:
    """Accounts for a pool of `num_blocks` blocks of `block_size` tokens each.

    Not thread-safe: it belongs to the engine thread.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Last in, first out: the blocks freed last are the likeliest to be in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_used = bytearray(num_blocks)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def missing(self, table: list[int], tokens: int) -> int:
        """Blocks the table lacks for its first `tokens` tokens; 0 if it has enough."""
        return max(self.blocks_for(tokens) - len(table), 0)

    def can_grow(self, table: list[int], tokens: int) -> bool:
        """Whether `grow` would succeed."""
        return self.missing(table, tokens) <= len(self._free)

    def grow(self, table: list[int], tokens: int) -> None:
        """Adds blocks until the table holds `tokens` tokens.

        Raises:
            OutOfBlocks: the pool is too empty; table and pool are unchanged.
        """
        missing = self.missing(table, tokens)
        if missing > len(self._free):
            raise OutOfBlocks(f"the KV pool has {len(self._free)} free blocks, {missing} are needed")
        for _ in range(missing):
            block = self._free.pop()
            self._is_used[block] = True
            table.append(block)

    def truncate(self, table: list[int], tokens: int) -> None:
        """Frees the blocks behind the first `tokens` tokens.

        Raises:
            ValueError: `tokens` is negative or more than the table holds; nothing was freed.
        """
        kept = self.blocks_for(tokens)
        if tokens < 0 or kept > len(table):
            raise ValueError(f"cannot cut a table of {len(table)} blocks to {tokens} tokens")
        while len(table) > kept:
            block = table.pop()
            if not self._is_used[block]:
                raise RuntimeError(f"block {block} was freed twice")
            self._is_used[block] = False
            self._free.append(block)

    def release(self, table: list[int]) -> None:
        """Frees all blocks of a table and empties it; an empty table is fine."""
        self.truncate(table, 0)

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Checks that the tables and the free list share out the pool: nothing lost, nothing owned twice.

        Args:
            tables: the tables of all streams there are.

        Raises:
            RuntimeError: naming the blocks in question.
        """
        owners = Counter(self._free)
        for table in tables:
            owners.update(table)
        doubled = sorted(block for block, count in owners.items() if count > 1)
        lost = sorted(set(range(self.num_blocks)) - owners.keys())
        foreign = sorted(owners.keys() - set(range(self.num_blocks)))
        mislabelled = sorted(block for block in self._free if self._is_used[block])
        if doubled or lost or foreign or mislabelled:
            raise RuntimeError(
                f"KV blocks owned twice: {doubled}, lost: {lost}, unknown: {foreign}, free but in use: {mislabelled}"
            )
