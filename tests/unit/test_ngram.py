"""Prompt lookup."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draft_service.lookup import LookupProposer
from draft_service.ngram import NgramIndex
from outrider.engine.block_manager import BlockManager
from outrider.engine.streams import Streams
from outrider.rpc.link import Attached, Delivery
from outrider.sampling import Form, SamplingParams
from outrider.seam import ProposalBatch, ProposeBatch
from tests.service.harness import Item, drafted, open_stream, propose
from tests.unit.drafting import OWNER, Link


def index(tokens: list[int], shortest: int = 2, longest: int = 4) -> NgramIndex:
    made = NgramIndex(shortest, longest)
    made.extend(tokens)
    return made


def by_scanning(tokens: list[int], shortest: int, longest: int, slots: int) -> list[int]:
    """The definition: the longest suffix that occurs earlier, its most recent occurrence, continued."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for position in range(end, end + slots):
                    text.append(text[position])
                return text[len(tokens) :]
    return []


def test_the_longest_suffix_wins_over_a_more_recent_shorter_one() -> None:
    """Guards precision: a longer match foretells better."""
    text = [1, 2, 3, 9, 8, 2, 3, 7, 6, 1, 2, 3]
    assert index(text).propose(2) == [9, 8]
    assert index(text, longest=2).propose(2) == [7, 6]


def test_the_most_recent_match_wins() -> None:
    """Guards texts that change on the way, such as edited code."""
    assert index([1, 2, 5, 1, 2, 6, 1, 2]).propose(1) == [6]


def test_no_match_means_no_slots() -> None:
    """Guards the target against guesses out of nothing."""
    assert index([1, 2, 3, 4]).propose(4) == []
    assert index([1]).propose(4) == []


def test_a_short_period_is_continued_for_all_slots() -> None:
    """Guards the speed on repetitive text: the match ends one token before the text does."""
    assert index([7, 7, 7]).propose(4) == [7, 7, 7, 7]
    assert index([1, 2, 1, 2, 1, 2]).propose(5) == [1, 2, 1, 2, 1]


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    shortest=st.integers(1, 3),
    extra=st.integers(0, 2),
    slots=st.integers(1, 6),
)
def test_the_index_grows_to_what_a_scan_finds(
    tokens: list[int], cuts: list[int], shortest: int, extra: int, slots: int
) -> None:
    """Guards the incremental index against the obvious implementation."""
    grown = NgramIndex(shortest, shortest + extra)
    positions = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in pairwise(positions):
        grown.extend(tokens[start:end])
    assert grown.propose(slots) == by_scanning(tokens, shortest, shortest + extra, slots)


class Desk:
    """An n-gram proposer and its only coordinator."""

    def __init__(self, excluded: list[int] | None = None) -> None:
        self.streams = Streams(BlockManager(1, 1), 10.0)
        self.proposer = LookupProposer(self.streams, lambda: NgramIndex(2, 4))
        self.link = Link()
        ids = np.array(excluded or [], np.uint32)
        self.proposer.receive(Attached(owner=OWNER, epoch=1, excluded_ids=ids))

    def propose(self, batch: ProposeBatch) -> ProposalBatch:
        self.proposer.receive(
            Delivery(owner=OWNER, epoch=1, link=self.link, batch=batch, refused=frozenset(), arrived_s=0.0)  # type: ignore[arg-type]
        )
        return self.link.take()


def test_rounds_extend_the_index_and_another_history_replaces_it() -> None:
    """Guards against proposals from tokens that were never committed, after a retry with another history."""
    desk = Desk()
    text = [1, 2, 3, 1, 2]
    assert drafted(desk.propose(propose([Item(1, text)], 3, opens=(open_stream(1, text),)))) == {1: [3, 1, 2]}
    text = [*text, 9, 1, 2]
    assert drafted(desk.propose(propose([Item(1, text, 5)], 2))) == {1: [9, 1]}
    other = [1, 2, 3, 1, 2, 4, 3, 1, 2]
    assert drafted(desk.propose(propose([Item(1, other, 5, generation=1)], 2))) == {1: [4, 3]}


def test_slots_are_one_hot_and_stop_at_a_stop_id_or_an_excluded_one() -> None:
    """Guards the wire (only ids travel), useless slots, and vocabularies that differ."""
    text = [1, 2, 3, 4, 5, 1, 2]
    batch = Desk().propose(propose([Item(1, text)], 4, opens=(open_stream(1, text),)))
    assert drafted(batch) == {1: [3, 4, 5, 1]}
    assert not batch.slots.support_sizes.any()
    assert (batch.slots.own_counts == 0xFFFF).all()
    stopped = open_stream(1, text, SamplingParams(stop_token_ids=(4,)))
    assert drafted(Desk().propose(propose([Item(1, text)], 4, opens=(stopped,)))) == {1: [3, 4]}
    desk = Desk(excluded=[4])
    assert drafted(desk.propose(propose([Item(1, text)], 4, opens=(open_stream(1, text),)))) == {1: [3]}


def test_the_dense_form_gets_no_slots() -> None:
    """Guards the coordinator against dense slots without rows."""
    text = [1, 2, 3, 1, 2]
    dense = open_stream(1, text, SamplingParams(), form=Form.DENSE)
    assert drafted(Desk().propose(propose([Item(1, text)], 4, opens=(dense,)))) == {1: []}


def test_closed_streams_leave_nothing_behind() -> None:
    """Guards the memory of a draft that runs for weeks."""
    desk = Desk()
    text = [1, 2, 3, 1, 2]
    for stream_id in range(20):
        desk.propose(propose([Item(stream_id, text)], 1, opens=(open_stream(stream_id, text),)))
        desk.proposer.receive(
            Delivery(
                owner=OWNER,
                epoch=1,
                link=desk.link,  # type: ignore[arg-type]
                batch=propose([], 0, closed=(stream_id,)),
                refused=frozenset(),
                arrived_s=0.0,
            )
        )
    assert len(desk.streams) == 0
    assert len(desk.proposer._lookups) == 0


def test_prompt_lookup_needs_no_torch() -> None:
    """Guards the start-up time and the memory of the default draft."""
    program = (
        "import sys, draft_service.__main__, draft_service.lookup_backend\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'ray')))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
