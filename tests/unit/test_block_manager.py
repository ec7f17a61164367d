"""The KV pool's accounts: nothing lost, nothing owned twice, nothing changed by a refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.block_manager import BlockManager, OutOfBlocks


def test_grow_takes_just_the_blocks_that_the_tokens_need():
    """Guards against tables one block short or long at block edges."""
    manager = BlockManager(num_blocks=8, block_size=4)
    table: list[int] = []
    for tokens, blocks in ((0, 0), (1, 1), (4, 1), (5, 2), (5, 2), (3, 2), (16, 4)):
        manager.grow(table, tokens)
        assert (len(table), manager.used_blocks, manager.free_blocks) == (blocks, blocks, 8 - blocks)


def test_a_refused_grow_changes_nothing():
    """Guards against blocks lost to a half-done allocation."""
    manager = BlockManager(num_blocks=3, block_size=4)
    mine, other = [], []
    manager.grow(other, 4)
    manager.grow(mine, 4)
    before = list(mine)
    assert manager.missing(mine, 13) > manager.free_blocks
    with pytest.raises(OutOfBlocks, match="1 free blocks, 3 are needed"):
        manager.grow(mine, 16)
    assert mine == before and manager.free_blocks == 1
    manager.check_integrity([mine, other])


def test_truncate_keeps_the_block_of_the_last_token():
    """Guards against a roll-back that cuts one block too many or keeps one too many."""
    manager = BlockManager(num_blocks=4, block_size=4)
    table: list[int] = []
    manager.grow(table, 16)
    first = table[0]
    for tokens, blocks in ((16, 4), (13, 4), (12, 3), (1, 1), (0, 0)):
        manager.truncate(table, tokens)
        assert len(table) == blocks
        assert not table or table[0] == first
    assert manager.free_blocks == 4


@pytest.mark.parametrize("tokens", [-1, -9, 9])
def test_truncate_out_of_range_raises_and_frees_nothing(tokens: int):
    """Guards against crop(-n) read as "from the end" and crop(len + 1) read as "no crop"."""
    manager = BlockManager(num_blocks=4, block_size=4)
    table: list[int] = []
    manager.grow(table, 8)
    with pytest.raises(ValueError, match="cannot cut"):
        manager.truncate(table, tokens)
    assert manager.used_blocks == 2


def test_releasing_twice_is_harmless_and_a_copied_table_is_caught():
    """Guards against a double free that gives one block to two streams."""
    manager = BlockManager(num_blocks=2, block_size=4)
    table: list[int] = []
    manager.grow(table, 8)
    copy = list(table)
    manager.release(table)
    manager.release(table)
    with pytest.raises(RuntimeError, match="freed twice"):
        manager.release(copy)


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ([[0, 1], [1]], r"owned twice: \[1\]"),
        ([[0]], r"lost: \[1\]"),
        ([[0, 1], [7]], r"unknown: \[7\]"),
        ([[0, 1], [2]], r"owned twice: \[2\]"),
    ],
)
def test_integrity_names_what_is_wrong(tables: list[list[int]], problem: str):
    """Planted errors: a block shared, forgotten, invented, or in use and free at once."""
    manager = BlockManager(num_blocks=3, block_size=4)
    manager.grow([], 8)  # blocks 0 and 1
    with pytest.raises(RuntimeError, match=problem):
        manager.check_integrity(tables)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=60))
def test_blocks_are_conserved_over_any_history(history: list[tuple[int, int]]):
    """Guards against leaks in any order of growing, cutting and refusing."""
    manager = BlockManager(num_blocks=10, block_size=3)
    tables: list[list[int]] = [[] for _ in range(4)]
    for stream, tokens in history:
        table = tables[stream]
        if manager.missing(table, tokens):
            if manager.missing(table, tokens) <= manager.free_blocks:
                manager.grow(table, tokens)
        else:
            manager.truncate(table, tokens)
        manager.check_integrity(tables)
    for table in tables:
        manager.release(table)
    assert manager.free_blocks == 10
