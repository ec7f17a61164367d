"""The suffix automaton as draft."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.config import DraftConfig
from draft_service.lookup import LookupProposer
from draft_service.suffix import SuffixIndex
from outrider.engine.block_manager import BlockManager
from outrider.engine.streams import Streams
from outrider.errors import InvalidArgument
from outrider.rpc.link import Attached, Delivery
from tests.service.harness import Item, drafted, open_stream, propose
from tests.unit.drafting import OWNER, Link


def by_scanning(tokens: list[int], shortest: int, slots: int) -> list[int]:
    """The definition: the longest suffix that occurs earlier, its most recent occurrence, continued."""
    for n in range(len(tokens) - 1, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for position in range(end, end + min(slots, 2 * n)):
                    text.append(text[position])
                return text[len(tokens) :]
    return []


def index(tokens: list[int], shortest: int = 1, window: int = 1 << 20) -> SuffixIndex:
    made = SuffixIndex(shortest, window)
    made.extend(tokens)
    return made


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    shortest=st.integers(1, 3),
    slots=st.integers(1, 8),
)
def test_the_automaton_finds_what_a_scan_finds(tokens: list[int], cuts: list[int], shortest: int, slots: int) -> None:
    """Guards the construction, clones and recency included, against the obvious implementation."""
    grown = SuffixIndex(shortest, 1 << 20)
    positions = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in pairwise(positions):
        grown.extend(tokens[start:end])
        assert grown.propose(slots) == by_scanning(tokens[:end], shortest, slots)


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=90), window=st.integers(4, 12))
def test_the_window_bounds_what_is_kept_and_only_that(tokens: list[int], window: int) -> None:
    """Guards the memory of a long stream, and its proposals: they are those of the tokens that are left."""
    made = index(tokens, window=window)
    assert made.size == len(tokens)
    assert min(len(tokens), window) <= len(made.tokens) <= 2 * window
    assert made.tokens == tokens[-len(made.tokens) :]
    assert len(made._length) <= 2 * len(made.tokens) + 1
    assert made.propose(4) == by_scanning(made.tokens, 1, 4)


def test_a_longer_match_than_any_ngram_decides() -> None:
    """Guards what the automaton is for: the last four tokens say 8, the last five 9."""
    text = [5, 1, 2, 3, 4, 9, 6, 1, 2, 3, 4, 8, 5, 1, 2, 3, 4]
    assert index(text).propose(1) == [9]


def test_a_short_match_drafts_little() -> None:
    """Guards the target's time: one matched token is no reason for eight slots."""
    assert index([1, 2, 3, 4, 5, 6, 7, 1]).propose(8) == [2, 3]


def test_one_token_over_and_over_stays_cheap() -> None:
    """Guards the service from a prompt that makes every suffix a match: the work per token is bounded."""
    made = index([7] * 20_000, window=8_192)
    assert made.propose(4) == [7, 7, 7, 7]


def test_streams_share_nothing_and_slots_are_one_hot() -> None:
    """Guards one stream's text from showing up in another's, and the wire."""
    proposer = LookupProposer(Streams(BlockManager(1, 1), 10.0), lambda: SuffixIndex(2, 64))
    proposer.receive(Attached(owner=OWNER, epoch=1, excluded_ids=np.empty(0, np.uint32)))
    link = Link()
    one, other = [1, 2, 3, 1, 2], [4, 1, 2]
    opens = (open_stream(1, one), open_stream(2, other))
    batch = propose([Item(1, one), Item(2, other)], 3, opens=opens)
    proposer.receive(
        Delivery(owner=OWNER, epoch=1, link=link, batch=batch, refused=frozenset(), arrived_s=0.0)  # type: ignore[arg-type]
    )
    answer = link.take()
    assert drafted(answer) == {1: [3, 1, 2], 2: []}
    assert (answer.slots.own_counts == 0xFFFF).all()
    assert not answer.slots.support_sizes.any()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": "suffix", "prompt_lookup_max": 4}, "prompt_lookup_max"),
        ({"model": "ngram", "suffix_window": 4_096}, "suffix_window"),
        ({"model": "suffix", "suffix_window": 1}, "suffix_window"),
        ({"model": "suffix", "draft_window": 64}, "draft_window"),
    ],
)
def test_settings_of_another_kind_are_refused(fields: dict[str, object], field: str) -> None:
    """Guards against settings that are ignored in silence."""
    with pytest.raises(InvalidArgument) as refused:
        DraftConfig(**fields)  # type: ignore[arg-type]
    assert refused.value.field == field
