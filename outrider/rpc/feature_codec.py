"""Features and the request for them to and from protobuf."""

from __future__ import annotations

from outrider.errors import InvalidArgument
from outrider.features import ELEMENT_BYTES, NO_FEATURES, FeatureRequest, Features
from outrider.rpc.columns import U8, U32, U64, read, write
from outrider.seam import U32 as U32Column
from outrider.v1 import common_pb2, target_pb2

_MOST_LAYERS = 16
_LARGEST_WINDOW = 4_096


def request_to_pb(request: FeatureRequest) -> common_pb2.FeatureRequest:
    return common_pb2.FeatureRequest(layers=request.layers, window=request.window)


def request_from_pb(message: common_pb2.FeatureRequest) -> FeatureRequest:
    """
    Raises:
        InvalidArgument: naming the field that is out of its range.
    """
    if not 1 <= len(message.layers) <= _MOST_LAYERS:
        raise InvalidArgument(
            "feature_request.layers", f"must name from 1 to {_MOST_LAYERS}, not {len(message.layers)}"
        )
    if not 1 <= message.window <= _LARGEST_WINDOW:
        raise InvalidArgument("feature_request.window", f"must be from 1 to {_LARGEST_WINDOW}, got {message.window}")
    return FeatureRequest(tuple(message.layers), message.window)


def features_to_pb(features: Features) -> common_pb2.Features | None:
    """None where there are none, which leaves the field unset."""
    if not len(features):
        return None
    return common_pb2.Features(
        stream_ids=write(features.stream_ids, U64),
        first_positions=write(features.first_positions, U32),
        row_counts=write(features.row_counts, U32),
        row_bytes=write(features.row_bytes, U32),
        rows=write(features.rows, U8),
    )


def features_from_pb(message: common_pb2.Features) -> Features:
    """
    Raises:
        InvalidArgument: naming the column that contradicts the others.
    """
    if not message.stream_ids:
        return NO_FEATURES
    stream_ids = read("features.stream_ids", message.stream_ids, U64)
    n = len(stream_ids)
    row_counts = read("features.row_counts", message.row_counts, U32, n)
    row_bytes = read("features.row_bytes", message.row_bytes, U32, n)
    if ((row_bytes == 0) | (row_bytes % ELEMENT_BYTES != 0)).any():
        raise InvalidArgument("features.row_bytes", f"must be positive multiples of {ELEMENT_BYTES}")
    size = sum(count * width for count, width in zip(row_counts.tolist(), row_bytes.tolist(), strict=True))
    return Features(
        stream_ids=stream_ids,
        first_positions=read("features.first_positions", message.first_positions, U32, n),
        row_counts=row_counts,
        row_bytes=row_bytes,
        rows=read("features.rows", message.rows, U8, size),
    )


def features_from(message: target_pb2.VerifyRequest, items: int) -> tuple[U32Column, FeatureRequest | None]:
    """The first wanted position of each item, and which hidden states are wanted; empty and None where none are.

    Raises:
        InvalidArgument: naming the field.
    """
    request = request_from_pb(message.feature_request) if message.HasField("feature_request") else None
    return read("features_from", message.features_from, U32, items if request is not None else 0), request
