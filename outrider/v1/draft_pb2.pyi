from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProposeRequest(_message.Message):
    __slots__ = ("hello", "opens", "closed_stream_ids", "items", "slots", "deadlines_ms", "features", "least_survivals")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINES_MS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LEAST_SURVIVALS_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    opens: _containers.RepeatedCompositeFieldContainer[_common_pb2.StreamOpen]
    closed_stream_ids: bytes
    items: _common_pb2.RequestItems
    slots: bytes
    deadlines_ms: bytes
    features: _common_pb2.Features
    least_survivals: bytes
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., opens: _Optional[_Iterable[_Union[_common_pb2.StreamOpen, _Mapping]]] = ..., closed_stream_ids: _Optional[bytes] = ..., items: _Optional[_Union[_common_pb2.RequestItems, _Mapping]] = ..., slots: _Optional[bytes] = ..., deadlines_ms: _Optional[bytes] = ..., features: _Optional[_Union[_common_pb2.Features, _Mapping]] = ..., least_survivals: _Optional[bytes] = ...) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("hello", "replies", "slots", "timings", "draining")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.HelloReply
    replies: _common_pb2.ReplyItems
    slots: _common_pb2.Slots
    timings: _common_pb2.Timings
    draining: bool
    def __init__(self, hello: _Optional[_Union[_common_pb2.HelloReply, _Mapping]] = ..., replies: _Optional[_Union[_common_pb2.ReplyItems, _Mapping]] = ..., slots: _Optional[_Union[_common_pb2.Slots, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., draining: _Optional[bool] = ...) -> None: ...
