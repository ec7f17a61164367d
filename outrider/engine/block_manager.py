"""BlockManager: who owns which block of the KV pool.

A block table is the list of block ids of one stream; position t lives in block `table[t // block_size]`. The manager
never sees tensors, and only it edits tables. A block is in as many tables as its count says. With a count of 0 it is
free, and if it has a name (`prefix_index`) its content can still be found until the block is needed for something else.

    operation    | table                              | pool
    grow         | + blocks until tokens fit          | - free ones, nameless first, then those that rested longest
    share        | + named blocks of a known prefix   | their counts + 1
    truncate     | - blocks behind the last token     | their counts - 1
    cut_out      | - blocks in the middle             | their counts - 1
    release      | - all                              | their counts - 1
    reclaim      | - blocks that others read too      | the rest of them lose their names

A block that is written is in one table and has no name; `reclaim` makes it so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from outrider.engine.prefix_index import PrefixIndex
from outrider.errors import Overloaded


class OutOfBlocks(Overloaded):
    """The pool has fewer free blocks than a stream needs to grow; nothing was taken."""


class Copy(NamedTuple):
    """KV to be copied before the next step: the first `tokens` positions of one block into another."""

    source: int
    target: int
    tokens: int


class BlockManager:
    """Accounts for a pool of `num_blocks` blocks of `block_size` tokens each.

    Not thread-safe: it belongs to the engine thread.

    Args:
        reuse: whether blocks can be named and shared.
    """

    def __init__(self, num_blocks: int, block_size: int, *, reuse: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reuse = reuse
        # Last in, first out: the blocks freed last are the likeliest to be in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._counts = [0] * num_blocks
        self._index = PrefixIndex()
        self._copies: list[Copy] = []

    @property
    def free_blocks(self) -> int:
        return len(self._free) + self._index.resting

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.free_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def missing(self, table: list[int], tokens: int) -> int:
        """Blocks the table lacks for its first `tokens` tokens; 0 if it has enough."""
        return max(self.blocks_for(tokens) - len(table), 0)

    def grow(self, table: list[int], tokens: int) -> None:
        """Adds blocks until the table holds `tokens` tokens.

        Raises:
            OutOfBlocks: the pool is too empty; table and pool are unchanged.
        """
        missing = self.missing(table, tokens)
        if missing > self.free_blocks:
            raise OutOfBlocks(f"the KV pool has {self.free_blocks} free blocks, {missing} are needed")
        for _ in range(missing):
            block = self._free.pop() if self._free else self._index.evict()
            self._counts[block] = 1
            table.append(block)

    def share(self, table: list[int], names: Sequence[bytes]) -> int:
        """Fills an empty table with the blocks of the longest known prefix; how many they are."""
        if table:
            raise ValueError("a prefix can be shared by a table that is empty only")
        for block in self._index.find(names):
            if not self._counts[block]:
                self._index.wake(block)
            self._counts[block] += 1
            table.append(block)
        return len(table)

    def name(self, block: int, name: bytes) -> None:
        """Lets others find a block, which will not be written any more."""
        if self.reuse:
            self._index.add(name, block)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Asks for a copy of the first positions of a block, to be made before anything is written."""
        self._copies.append(Copy(source, target, tokens))

    def take_copies(self) -> list[Copy]:
        """The copies asked for since the last call, to be made in this order before the next step."""
        copies, self._copies = self._copies, []
        return copies

    def reclaim(self, table: list[int], first: int) -> int:
        """Makes the blocks from index `first` on writable; how many blocks the table keeps.

        Nameless ones of its own are so already. From the first one that another table has too the table is cut.
        """
        for index in range(first, len(table)):
            if self._counts[table[index]] > 1:
                self.truncate(table, index * self.block_size)
                break
            self._index.drop(table[index])
        return len(table)

    def truncate(self, table: list[int], tokens: int) -> None:
        """Gives up the blocks behind the first `tokens` tokens.

        Raises:
            ValueError: `tokens` is negative or more than the table holds; nothing was freed.
        """
        kept = self.blocks_for(tokens)
        if tokens < 0 or kept > len(table):
            raise ValueError(f"cannot cut a table of {len(table)} blocks to {tokens} tokens")
        # From the end: of a prefix that nobody uses the last blocks are forgotten first.
        while len(table) > kept:
            self._give_up(table.pop())

    def cut_out(self, table: list[int], first: int, count: int) -> None:
        """Gives up `count` blocks in the middle of a table, from index `first` on."""
        for block in reversed(table[first : first + count]):
            self._give_up(block)
        del table[first : first + count]

    def release(self, table: list[int]) -> None:
        """Gives up all blocks of a table and empties it; an empty table is fine."""
        self.truncate(table, 0)

    def _give_up(self, block: int) -> None:
        if not self._counts[block]:
            raise RuntimeError(f"block {block} was freed twice")
        self._counts[block] -= 1
        if not self._counts[block] and not self._index.rest(block):
            self._free.append(block)

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Checks that tables, counts, index and free list agree: nothing lost, nothing owned unawares.

        Args:
            tables: the tables of all streams there are.

        Raises:
            RuntimeError: naming the blocks in question.
        """
        held, free, named = Counter[int](), Counter(self._free), self._index.named
        for table in tables:
            held.update(table)
        doubled, lost, wrong = [], [], []
        for block, count in enumerate(self._counts):
            idle = free[block] + self._index.rests(block)
            if held[block] > count or idle > 1:
                doubled.append(block)
            if held[block] < count or not count + idle:
                lost.append(block)
            if (count and idle) or (free[block] and block in named):
                wrong.append(block)
        foreign = sorted((held.keys() | free.keys()) - set(range(self.num_blocks)))
        if doubled or lost or foreign or wrong:
            raise RuntimeError(
                f"KV blocks owned twice: {doubled}, lost: {lost}, unknown: {foreign}, free but in use: {wrong}"
            )

    def check_private(self, blocks: Iterable[int]) -> None:
        """Checks that blocks may be written.

        Raises:
            RuntimeError: naming those that other streams read, or may find.
        """
        named = self._index.named
        exposed = [block for block in blocks if self._counts[block] != 1 or block in named]
        if exposed:
            raise RuntimeError(f"KV blocks that may be written but are in several tables or have a name: {exposed}")
