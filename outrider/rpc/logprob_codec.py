"""Log-probabilities to and from protobuf."""

from __future__ import annotations

from outrider.logprobs import NO_LOGPROBS, Logprobs
from outrider.rpc.columns import F32, U8, U32, U64, read, total, write
from outrider.v1 import common_pb2


def logprobs_to_pb(logprobs: Logprobs) -> common_pb2.Logprobs | None:
    """None, an unset field, where there are none."""
    if not len(logprobs):
        return None
    return common_pb2.Logprobs(
        stream_ids=write(logprobs.stream_ids, U64),
        committed_lengths=write(logprobs.committed_lengths, U32),
        own_counts=write(logprobs.own_counts, U32),
        row_counts=write(logprobs.row_counts, U32),
        widths=write(logprobs.widths, U8),
        own=write(logprobs.own, F32),
        top_ids=write(logprobs.top_ids, U32),
        top=write(logprobs.top, F32),
    )


def logprobs_from_pb(message: common_pb2.Logprobs, name: str) -> Logprobs:
    """
    Args:
        message: the field.
        name: of the field, for errors.

    Raises:
        InvalidArgument: naming the column that contradicts the others.
    """
    if not message.stream_ids:
        return NO_LOGPROBS
    stream_ids = read(f"{name}.stream_ids", message.stream_ids, U64)
    n = len(stream_ids)
    own_counts = read(f"{name}.own_counts", message.own_counts, U32, n)
    row_counts = read(f"{name}.row_counts", message.row_counts, U32, n)
    widths = read(f"{name}.widths", message.widths, U8, n)
    tops = sum(rows * width for rows, width in zip(row_counts.tolist(), widths.tolist(), strict=True))
    return Logprobs(
        stream_ids=stream_ids,
        committed_lengths=read(f"{name}.committed_lengths", message.committed_lengths, U32, n),
        own_counts=own_counts,
        row_counts=row_counts,
        widths=widths,
        own=read(f"{name}.own", message.own, F32, total(own_counts)),
        top_ids=read(f"{name}.top_ids", message.top_ids, U32, tops),
        top=read(f"{name}.top", message.top, F32, tops),
    )
