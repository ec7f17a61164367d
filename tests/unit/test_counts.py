"""Counts of a text's ids follow it through drafts, cuts and retries, and equal a count from the start."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from outrider.engine.block_manager import BlockManager
from outrider.engine.counts import Counts
from outrider.engine.logits import RowContext, process
from outrider.engine.streams import Streams
from outrider.sampling import SamplingParams
from outrider.seam import StreamOpen, prefix_hash

OWNER = b"c" * 16
PARAMS = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
PROMPT = [3, 1, 3, 7]
VOCAB = 20


def follow(steps: int) -> None:
    """A stream's rounds, item by item as a service sees them; its rows' counts against a count from the start."""
    coins = random.Random(5)
    streams = Streams(BlockManager(64, 4), 10.0)
    streams.attach(OWNER, 1)
    opened = StreamOpen(stream_id=1, prompt_length=len(PROMPT), params=PARAMS)
    sequence = streams.open(opened, OWNER)
    committed = list(PROMPT)
    base = 0
    for _ in range(steps):
        if coins.random() < 0.05:  # its link was lost and it is opened anew
            sequence = streams.open(opened, OWNER)
        tokens, base_hash = committed[base:], prefix_hash(committed[:base])
        streams.sync(
            1, OWNER, sequence.generation, base=base, tokens=tokens, committed=len(committed), base_hash=base_hash
        )
        drafted = [coins.randrange(VOCAB) for _ in range(coins.randrange(5))]
        sequence.tokens.extend(drafted)
        for _ in range(coins.choice((1, 1, 2))):  # a step that failed is run again
            for length in range(len(committed), len(sequence.tokens) + 1):
                counts = sequence.counts
                assert counts is not None
                counts.reach(sequence.tokens, length)
                for tally, part in ((counts.known, sequence.tokens[:length]), (counts.text, sequence.tokens[4:length])):
                    assert dict(zip(tally.ids.tolist(), tally.counts.tolist(), strict=True)) == Counter(part)
        base = len(committed)
        committed += [*drafted[: coins.randrange(5)], coins.randrange(VOCAB)]
        if len(committed) > 180 or coins.random() < 0.05:  # a coordinator that commits other tokens than before
            committed = committed[: coins.randrange(len(PROMPT), len(committed))]
            base = 0


def test_counts_follow_any_history() -> None:
    """Guards penalties against tokens that were cut: rejected drafts, retries, a stream opened anew."""
    follow(300)


def test_a_missed_cut_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk above must notice tokens that stay counted although others took their place."""
    monkeypatch.setattr(Counts, "cut", lambda self, length: None)
    with pytest.raises(AssertionError):
        follow(300)


def test_kept_counts_give_the_bits_of_fresh_ones() -> None:
    """Guards greedy and coupled equality between plain rows and verify rows that penalise."""
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(1))
    tokens = [*PROMPT, 3, 9, 9, 1, 3]
    kept = Counts(len(PROMPT))
    kept.reach(tokens, 6)
    rows = [RowContext(PARAMS, tokens, length, len(PROMPT)) for length in (7, 8, 9)]
    with_kept = [row._replace(counts=kept) for row in rows]
    assert torch.equal(process(logits, with_kept).p, process(logits, rows).p)
