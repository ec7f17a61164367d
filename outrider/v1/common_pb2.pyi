from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AcceptanceRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_RULE_UNSPECIFIED: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_STANDARD: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_COUPLED: _ClassVar[AcceptanceRule]

class WireForm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WIRE_FORM_UNSPECIFIED: _ClassVar[WireForm]
    WIRE_FORM_SPARSE: _ClassVar[WireForm]
    WIRE_FORM_DENSE: _ClassVar[WireForm]

class PlantedError(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLANTED_ERROR_UNSPECIFIED: _ClassVar[PlantedError]
    PLANTED_ERROR_SHARED_NOISE: _ClassVar[PlantedError]
    PLANTED_ERROR_RAW_Q: _ClassVar[PlantedError]
    PLANTED_ERROR_ROW_SHIFT: _ClassVar[PlantedError]
    PLANTED_ERROR_DROP_AFTER_LOOK: _ClassVar[PlantedError]

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_CHOICE: _ClassVar[GrammarKind]
    GRAMMAR_KIND_TOOL_CALLS: _ClassVar[GrammarKind]
ACCEPTANCE_RULE_UNSPECIFIED: AcceptanceRule
ACCEPTANCE_RULE_STANDARD: AcceptanceRule
ACCEPTANCE_RULE_COUPLED: AcceptanceRule
WIRE_FORM_UNSPECIFIED: WireForm
WIRE_FORM_SPARSE: WireForm
WIRE_FORM_DENSE: WireForm
PLANTED_ERROR_UNSPECIFIED: PlantedError
PLANTED_ERROR_SHARED_NOISE: PlantedError
PLANTED_ERROR_RAW_Q: PlantedError
PLANTED_ERROR_ROW_SHIFT: PlantedError
PLANTED_ERROR_DROP_AFTER_LOOK: PlantedError
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_CHOICE: GrammarKind
GRAMMAR_KIND_TOOL_CALLS: GrammarKind

class Hello(_message.Message):
    __slots__ = ("coordinator_id", "link_epoch", "protocol", "excluded_ids")
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    LINK_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_IDS_FIELD_NUMBER: _ClassVar[int]
    coordinator_id: bytes
    link_epoch: int
    protocol: ProtocolRange
    excluded_ids: bytes
    def __init__(self, coordinator_id: _Optional[bytes] = ..., link_epoch: _Optional[int] = ..., protocol: _Optional[_Union[ProtocolRange, _Mapping]] = ..., excluded_ids: _Optional[bytes] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("instance_id", "lease_ms", "credit", "protocol_version")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    lease_ms: int
    credit: int
    protocol_version: int
    def __init__(self, instance_id: _Optional[str] = ..., lease_ms: _Optional[int] = ..., credit: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class ProtocolRange(_message.Message):
    __slots__ = ("min", "max")
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    min: int
    max: int
    def __init__(self, min: _Optional[int] = ..., max: _Optional[int] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "min_tokens", "stop_token_ids", "max_tokens", "bad_words", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: str
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StreamOpen(_message.Message):
    __slots__ = ("stream_id", "fork_of", "prompt_length", "params", "rule", "form", "draft_key", "emit_key", "gumbel_key", "sample_index", "logprobs", "deadline_ms", "planted_error", "prompt_logprobs", "cache_salt", "traceparent")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    DRAFT_KEY_FIELD_NUMBER: _ClassVar[int]
    EMIT_KEY_FIELD_NUMBER: _ClassVar[int]
    GUMBEL_KEY_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PLANTED_ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    fork_of: int
    prompt_length: int
    params: SamplingParams
    rule: AcceptanceRule
    form: WireForm
    draft_key: int
    emit_key: int
    gumbel_key: int
    sample_index: int
    logprobs: int
    deadline_ms: int
    planted_error: PlantedError
    prompt_logprobs: int
    cache_salt: int
    traceparent: str
    def __init__(self, stream_id: _Optional[int] = ..., fork_of: _Optional[int] = ..., prompt_length: _Optional[int] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., rule: _Optional[_Union[AcceptanceRule, str]] = ..., form: _Optional[_Union[WireForm, str]] = ..., draft_key: _Optional[int] = ..., emit_key: _Optional[int] = ..., gumbel_key: _Optional[int] = ..., sample_index: _Optional[int] = ..., logprobs: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., planted_error: _Optional[_Union[PlantedError, str]] = ..., prompt_logprobs: _Optional[int] = ..., cache_salt: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class RequestItems(_message.Message):
    __slots__ = ("stream_ids", "generations", "committed_lengths", "bases", "prefix_hashes", "token_counts", "tokens")
    STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    stream_ids: bytes
    generations: bytes
    committed_lengths: bytes
    bases: bytes
    prefix_hashes: bytes
    token_counts: bytes
    tokens: bytes
    def __init__(self, stream_ids: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., committed_lengths: _Optional[bytes] = ..., bases: _Optional[bytes] = ..., prefix_hashes: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class Slots(_message.Message):
    __slots__ = ("per_item", "draft_ids", "own_counts", "support_sizes", "q_ids", "q_counts", "dense_q")
    PER_ITEM_FIELD_NUMBER: _ClassVar[int]
    DRAFT_IDS_FIELD_NUMBER: _ClassVar[int]
    OWN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_SIZES_FIELD_NUMBER: _ClassVar[int]
    Q_IDS_FIELD_NUMBER: _ClassVar[int]
    Q_COUNTS_FIELD_NUMBER: _ClassVar[int]
    DENSE_Q_FIELD_NUMBER: _ClassVar[int]
    per_item: bytes
    draft_ids: bytes
    own_counts: bytes
    support_sizes: bytes
    q_ids: bytes
    q_counts: bytes
    dense_q: bytes
    def __init__(self, per_item: _Optional[bytes] = ..., draft_ids: _Optional[bytes] = ..., own_counts: _Optional[bytes] = ..., support_sizes: _Optional[bytes] = ..., q_ids: _Optional[bytes] = ..., q_counts: _Optional[bytes] = ..., dense_q: _Optional[bytes] = ...) -> None: ...

class FeatureRequest(_message.Message):
    __slots__ = ("layers", "window")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    window: int
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., window: _Optional[int] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("stream_ids", "first_positions", "row_counts", "row_bytes", "rows")
    STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    stream_ids: bytes
    first_positions: bytes
    row_counts: bytes
    row_bytes: bytes
    rows: bytes
    def __init__(self, stream_ids: _Optional[bytes] = ..., first_positions: _Optional[bytes] = ..., row_counts: _Optional[bytes] = ..., row_bytes: _Optional[bytes] = ..., rows: _Optional[bytes] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("stream_ids", "committed_lengths", "own_counts", "row_counts", "widths", "own", "top_ids", "top")
    STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    OWN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    WIDTHS_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    stream_ids: bytes
    committed_lengths: bytes
    own_counts: bytes
    row_counts: bytes
    widths: bytes
    own: bytes
    top_ids: bytes
    top: bytes
    def __init__(self, stream_ids: _Optional[bytes] = ..., committed_lengths: _Optional[bytes] = ..., own_counts: _Optional[bytes] = ..., row_counts: _Optional[bytes] = ..., widths: _Optional[bytes] = ..., own: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top: _Optional[bytes] = ...) -> None: ...

class ItemError(_message.Message):
    __slots__ = ("index", "message")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    index: int
    message: str
    def __init__(self, index: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class ItemNote(_message.Message):
    __slots__ = ("index", "prefix_tokens", "preemptions")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    index: int
    prefix_tokens: int
    preemptions: int
    def __init__(self, index: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...

class ReplyItems(_message.Message):
    __slots__ = ("stream_ids", "generations", "committed_lengths", "statuses", "cached_lengths", "errors", "notes")
    STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    CACHED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    stream_ids: bytes
    generations: bytes
    committed_lengths: bytes
    statuses: bytes
    cached_lengths: bytes
    errors: _containers.RepeatedCompositeFieldContainer[ItemError]
    notes: _containers.RepeatedCompositeFieldContainer[ItemNote]
    def __init__(self, stream_ids: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., committed_lengths: _Optional[bytes] = ..., statuses: _Optional[bytes] = ..., cached_lengths: _Optional[bytes] = ..., errors: _Optional[_Iterable[_Union[ItemError, _Mapping]]] = ..., notes: _Optional[_Iterable[_Union[ItemNote, _Mapping]]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ms", "forward_ms", "sample_ms", "total_ms", "step_streams", "step_tokens")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_STREAMS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    forward_ms: float
    sample_ms: float
    total_ms: float
    step_streams: int
    step_tokens: int
    def __init__(self, queue_ms: _Optional[float] = ..., forward_ms: _Optional[float] = ..., sample_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., step_streams: _Optional[int] = ..., step_tokens: _Optional[int] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceInfo(_message.Message):
    __slots__ = ("build", "protocol", "rule_version", "noise_version", "instance_id", "model_id", "model_revision", "weight_hash", "parameters", "dtype", "tokenizer_hash", "tokenizer_size", "vocab_rows", "eos_token_ids", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_tokens", "block_size", "max_slots", "attention_backend", "device_name", "device_uuid", "batch_invariant", "batch_invariance_note", "draft_kind", "open_streams", "kv_blocks_used", "kv_blocks_total", "last_step_age_ms", "steps", "step_streams_total", "step_tokens_total", "hidden_size", "num_layers", "features", "trained_for", "feature_bytes", "allow_planted_errors", "costs", "preemptions", "prefix_tokens_asked", "prefix_tokens_found", "steps_replayed")
    BUILD_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RULE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOISE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_HASH_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_ROWS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANCE_NOTE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_KIND_FIELD_NUMBER: _ClassVar[int]
    OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_STREAMS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FOR_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOW_PLANTED_ERRORS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_ASKED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FOUND_FIELD_NUMBER: _ClassVar[int]
    STEPS_REPLAYED_FIELD_NUMBER: _ClassVar[int]
    build: str
    protocol: ProtocolRange
    rule_version: int
    noise_version: int
    instance_id: str
    model_id: str
    model_revision: str
    weight_hash: str
    parameters: int
    dtype: str
    tokenizer_hash: str
    tokenizer_size: int
    vocab_rows: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_tokens: int
    block_size: int
    max_slots: int
    attention_backend: str
    device_name: str
    device_uuid: str
    batch_invariant: bool
    batch_invariance_note: str
    draft_kind: str
    open_streams: int
    kv_blocks_used: int
    kv_blocks_total: int
    last_step_age_ms: int
    steps: int
    step_streams_total: int
    step_tokens_total: int
    hidden_size: int
    num_layers: int
    features: FeatureRequest
    trained_for: str
    feature_bytes: int
    allow_planted_errors: bool
    costs: CostProfile
    preemptions: int
    prefix_tokens_asked: int
    prefix_tokens_found: int
    steps_replayed: int
    def __init__(self, build: _Optional[str] = ..., protocol: _Optional[_Union[ProtocolRange, _Mapping]] = ..., rule_version: _Optional[int] = ..., noise_version: _Optional[int] = ..., instance_id: _Optional[str] = ..., model_id: _Optional[str] = ..., model_revision: _Optional[str] = ..., weight_hash: _Optional[str] = ..., parameters: _Optional[int] = ..., dtype: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., tokenizer_size: _Optional[int] = ..., vocab_rows: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., kv_cache_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., max_slots: _Optional[int] = ..., attention_backend: _Optional[str] = ..., device_name: _Optional[str] = ..., device_uuid: _Optional[str] = ..., batch_invariant: _Optional[bool] = ..., batch_invariance_note: _Optional[str] = ..., draft_kind: _Optional[str] = ..., open_streams: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., last_step_age_ms: _Optional[int] = ..., steps: _Optional[int] = ..., step_streams_total: _Optional[int] = ..., step_tokens_total: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., features: _Optional[_Union[FeatureRequest, _Mapping]] = ..., trained_for: _Optional[str] = ..., feature_bytes: _Optional[int] = ..., allow_planted_errors: _Optional[bool] = ..., costs: _Optional[_Union[CostProfile, _Mapping]] = ..., preemptions: _Optional[int] = ..., prefix_tokens_asked: _Optional[int] = ..., prefix_tokens_found: _Optional[int] = ..., steps_replayed: _Optional[int] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("streams", "tokens", "context", "forward_ms", "sample_ms")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_MS_FIELD_NUMBER: _ClassVar[int]
    streams: int
    tokens: int
    context: int
    forward_ms: float
    sample_ms: float
    def __init__(self, streams: _Optional[int] = ..., tokens: _Optional[int] = ..., context: _Optional[int] = ..., forward_ms: _Optional[float] = ..., sample_ms: _Optional[float] = ...) -> None: ...

class CostProfile(_message.Message):
    __slots__ = ("state", "steps", "seconds", "fixed_ms", "row_ms", "context_ms", "floor_ms")
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIXED_MS_FIELD_NUMBER: _ClassVar[int]
    ROW_MS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_MS_FIELD_NUMBER: _ClassVar[int]
    FLOOR_MS_FIELD_NUMBER: _ClassVar[int]
    state: str
    steps: _containers.RepeatedCompositeFieldContainer[StepCost]
    seconds: float
    fixed_ms: float
    row_ms: float
    context_ms: float
    floor_ms: float
    def __init__(self, state: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[StepCost, _Mapping]]] = ..., seconds: _Optional[float] = ..., fixed_ms: _Optional[float] = ..., row_ms: _Optional[float] = ..., context_ms: _Optional[float] = ..., floor_ms: _Optional[float] = ...) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: ServiceInfo
    def __init__(self, info: _Optional[_Union[ServiceInfo, _Mapping]] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("file_name", "data")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    data: bytes
    def __init__(self, file_name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...
