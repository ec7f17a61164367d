from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("hello", "opens", "closed_stream_ids", "items", "slots", "runs", "features_from", "feature_request")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FROM_FIELD_NUMBER: _ClassVar[int]
    FEATURE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    opens: _containers.RepeatedCompositeFieldContainer[_common_pb2.StreamOpen]
    closed_stream_ids: bytes
    items: _common_pb2.RequestItems
    slots: _common_pb2.Slots
    runs: bytes
    features_from: bytes
    feature_request: _common_pb2.FeatureRequest
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., opens: _Optional[_Iterable[_Union[_common_pb2.StreamOpen, _Mapping]]] = ..., closed_stream_ids: _Optional[bytes] = ..., items: _Optional[_Union[_common_pb2.RequestItems, _Mapping]] = ..., slots: _Optional[_Union[_common_pb2.Slots, _Mapping]] = ..., runs: _Optional[bytes] = ..., features_from: _Optional[bytes] = ..., feature_request: _Optional[_Union[_common_pb2.FeatureRequest, _Mapping]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("hello", "replies", "slots_done", "cuts", "p", "emit", "bonus", "dense_p", "timings", "features", "logprobs", "prompt_logprobs", "draining")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_DONE_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    P_FIELD_NUMBER: _ClassVar[int]
    EMIT_FIELD_NUMBER: _ClassVar[int]
    BONUS_FIELD_NUMBER: _ClassVar[int]
    DENSE_P_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.HelloReply
    replies: _common_pb2.ReplyItems
    slots_done: bytes
    cuts: bytes
    p: bytes
    emit: bytes
    bonus: bytes
    dense_p: bytes
    timings: _common_pb2.Timings
    features: _common_pb2.Features
    logprobs: _common_pb2.Logprobs
    prompt_logprobs: _common_pb2.Logprobs
    draining: bool
    def __init__(self, hello: _Optional[_Union[_common_pb2.HelloReply, _Mapping]] = ..., replies: _Optional[_Union[_common_pb2.ReplyItems, _Mapping]] = ..., slots_done: _Optional[bytes] = ..., cuts: _Optional[bytes] = ..., p: _Optional[bytes] = ..., emit: _Optional[bytes] = ..., bonus: _Optional[bytes] = ..., dense_p: _Optional[bytes] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., features: _Optional[_Union[_common_pb2.Features, _Mapping]] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., draining: _Optional[bool] = ...) -> None: ...
