"""GetInfo: what a service is, from what its model and its engine say."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, NamedTuple

from outrider import __version__
from outrider.rpc.options import NOISE_VERSION, PROTOCOL_MAX, PROTOCOL_MIN, RULE_VERSION
from outrider.v1 import common_pb2
from outrider.vocabulary import Vocabulary

if TYPE_CHECKING:
    from outrider.engine.info import ModelInfo
    from outrider.engine.runner import RunnerStats


ServiceInfo = common_pb2.ServiceInfo


class Serving(NamedTuple):
    """A service's limits and its present load.

    Attributes:
        max_model_len: positions per stream.
        max_num_seqs: streams in one step.
        max_num_batched_tokens: token rows in one step.
        max_slots: drafted slots per item.
        open_streams: streams held.
        kv_blocks_used, kv_blocks_total: of the pool.
        allow_planted_errors: whether streams may ask for errors on purpose.
        preemptions: streams that lost their KV to an older one, since the start.
        prefix_tokens_asked, prefix_tokens_found: looked for among cached prefixes, and found, since the start.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_slots: int
    open_streams: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    allow_planted_errors: bool = False
    preemptions: int = 0
    prefix_tokens_asked: int = 0
    prefix_tokens_found: int = 0


def new_instance_id() -> str:
    """The identity of this process's service; made once, at start."""
    return uuid.uuid4().hex


def base_info(instance_id: str, serving: Serving) -> ServiceInfo:
    """What every service says, with or without a model."""
    return ServiceInfo(
        build=__version__,
        protocol=common_pb2.ProtocolRange(min=PROTOCOL_MIN, max=PROTOCOL_MAX),
        rule_version=RULE_VERSION,
        noise_version=NOISE_VERSION,
        instance_id=instance_id,
        max_model_len=serving.max_model_len,
        max_num_seqs=serving.max_num_seqs,
        max_num_batched_tokens=serving.max_num_batched_tokens,
        max_slots=serving.max_slots,
        open_streams=serving.open_streams,
        kv_blocks_used=serving.kv_blocks_used,
        kv_blocks_total=serving.kv_blocks_total,
        allow_planted_errors=serving.allow_planted_errors,
        preemptions=serving.preemptions,
        prefix_tokens_asked=serving.prefix_tokens_asked,
        prefix_tokens_found=serving.prefix_tokens_found,
    )


def model_info(
    instance_id: str, serving: Serving, model: ModelInfo, vocabulary: Vocabulary | None, stats: RunnerStats
) -> ServiceInfo:
    """What a service with a model says.

    Args:
        instance_id: identity of the process.
        serving: limits and load.
        model: what the engine loaded.
        vocabulary: of the model's tokenizer; None if the folder has none.
        stats: of the engine thread.
    """
    info = base_info(instance_id, serving)
    info.model_id = model.model_id
    info.model_revision = model.revision
    info.weight_hash = model.weight_hash
    info.parameters = model.parameters
    info.num_layers = model.num_layers
    info.dtype = model.dtype
    info.tokenizer_hash = vocabulary.hash if vocabulary else ""
    info.tokenizer_size = len(vocabulary.tokens) if vocabulary else 0
    info.vocab_rows = model.vocab_rows
    info.eos_token_ids.extend(model.eos_token_ids)
    info.kv_cache_tokens = serving.kv_blocks_total * model.block_size
    info.block_size = model.block_size
    info.attention_backend = model.attention_backend
    info.device_name = model.device_name
    info.device_uuid = model.device_uuid
    info.batch_invariant = model.invariant
    info.batch_invariance_note = model.invariance_note
    info.steps = stats.steps_total
    info.steps_replayed = stats.steps_replayed_total
    info.step_streams_total = stats.step_streams_total
    info.step_tokens_total = stats.step_tokens_total
    if stats.last_step_age_s is not None:
        info.last_step_age_ms = round(stats.last_step_age_s * 1_000)
    return info
