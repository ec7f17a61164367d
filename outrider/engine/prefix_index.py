"""Prefix reuse: which KV block holds which prefix, and which of these blocks nobody is using.

A full block is named by a hash over its tokens and the name of the block before it, so that a name stands for the whole
prefix up to the block's end. The first block's name starts from the tenant's salt: tenants never find one another's
prefixes. The hash is cryptographic, because a made-up collision would show one stream's text to another.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

_NAME_BYTES = 16


class BlockNames:
    """The names of one stream's full blocks, as far as they were asked for.

    Args:
        salt: of the tenant, 64 bits.
        block_size: tokens per block.
    """

    __slots__ = ("_block_size", "_names", "_root")

    def __init__(self, salt: int, block_size: int) -> None:
        self._root = salt.to_bytes(8, "little")
        self._block_size = block_size
        self._names: list[bytes] = []

    def upto(self, tokens: Sequence[int], blocks: int) -> list[bytes]:
        """The names of the first `blocks` blocks of `tokens`, which must fill them."""
        size = self._block_size
        for index in range(len(self._names), blocks):
            before = self._names[-1] if self._names else self._root
            content = array("I", tokens[index * size : (index + 1) * size])
            self._names.append(blake2b(before + content.tobytes(), digest_size=_NAME_BYTES).digest())
        return self._names[:blocks]

    def cut(self, length: int) -> None:
        """Forgets the names of blocks that end behind the first `length` tokens."""
        del self._names[length // self._block_size :]


class PrefixIndex:
    """Names and blocks, one to one; blocks that are in no table *rest* here until they are found again or evicted."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._resting: OrderedDict[int, None] = OrderedDict()

    @property
    def resting(self) -> int:
        """How many blocks rest."""
        return len(self._resting)

    @property
    def named(self) -> frozenset[int]:
        """Every block that has a name, resting or not."""
        return frozenset(self._name_of)

    def rests(self, block: int) -> bool:
        """Whether a block rests here."""
        return block in self._resting

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix, in order."""
        found: list[int] = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, name: bytes, block: int) -> None:
        """Names a block. Where another one has the name already, this one stays nameless and private."""
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name], self._name_of[block] = block, name

    def drop(self, block: int) -> None:
        """Takes a block's name away, if it has one: its content is about to change."""
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]
            self._resting.pop(block, None)

    def rest(self, block: int) -> bool:
        """A block has left its last table; True if it is kept here because it has a name."""
        if block not in self._name_of:
            return False
        self._resting[block] = None
        return True

    def wake(self, block: int) -> None:
        """A resting block is in a table again."""
        del self._resting[block]

    def evict(self) -> int:
        """Takes the block that has rested longest out of the index.

        Raises:
            KeyError: none rests.
        """
        block, _ = self._resting.popitem(last=False)
        del self._block_of[self._name_of.pop(block)]
        return block
