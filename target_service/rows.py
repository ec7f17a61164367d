"""The columns of a message as rows, one per item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from outrider.features import NOT_WANTED, FeatureRequest
from outrider.rpc.columns import offsets
from outrider.seam import VerifyBatch
from target_service.item import Key, Stream
from target_service.proposal import Proposal, read_proposals
from target_service.scoring import draws_dense


class Row(NamedTuple):
    """One item of a message."""

    stream_id: int
    key: Key
    base: int
    base_hash: int
    tokens: list[int]
    proposal: Proposal
    slots_sent: int
    run: int
    features_from: int
    request: FeatureRequest | None


def read_rows(batch: VerifyBatch, known: Mapping[int, Stream], vocab: int) -> Iterator[Row]:
    """The items of a message, with their proposals judged.

    Args:
        batch: the message.
        known: open streams, which tell whose q travels as whole rows.
        vocab: rows of the target's vocabulary.
    """
    items = batch.items
    ids = items.stream_ids.tolist()
    streams = [known.get(stream_id) for stream_id in ids]
    dense = [stream is not None and draws_dense(stream.opened) for stream in streams]
    starts = offsets(items.token_counts)
    request = batch.feature_request
    columns = zip(
        ids,
        map(Key, items.generations.tolist(), items.committed_lengths.tolist()),
        items.bases.tolist(),
        items.prefix_hashes.tolist(),
        read_proposals(batch.slots, dense, vocab),
        batch.slots.per_item.tolist(),
        batch.runs.tolist(),
        batch.features_from.tolist() if request is not None else [NOT_WANTED] * len(ids),
        strict=True,
    )
    for index, (stream_id, key, base, base_hash, proposal, sent, run, wanted) in enumerate(columns):
        tokens = items.tokens[starts[index] : starts[index + 1]].tolist()
        yield Row(stream_id, key, base, base_hash, tokens, proposal, sent, run, wanted, request)
