"""The draft service's configuration: frozen, every default written once, unknown keys refused."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from outrider.errors import InvalidArgument
from outrider.rpc.options import DRAFT_PORT

SampleMethod = Literal["probabilistic", "greedy"]

NGRAM = "ngram"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """How the draft service runs; the flags have the same names with dashes.

    Attributes:
        model: folder of a causal LM or of an EAGLE-3 head, `ngram` for prompt lookup, or `stub:...`.
        host: address to listen on.
        port: 0 takes a free one.
        device: as in `EngineConfig`.
        dtype: as in `EngineConfig`.
        threads: torch threads; unset leaves torch's choice.
        model_id: name reported in GetInfo; unset means the folder's.
        revision: revision reported in GetInfo.
        max_model_len: longest stream in tokens; longer ones get no slots. Unset means the model's own limit.
        max_num_seqs: streams in one step.
        max_num_batched_tokens: token rows in one step.
        kv_cache_tokens: size of the KV pool in tokens; unset means from the memory plan.
        block_size: tokens per KV block; unset means the attention path's own.
        gpu_memory_utilization: share of the GPU's memory to use.
        trust_remote_code: whether the model folder may bring Python code.
        max_slots: drafted slots per item at most.
        draft_top_k: ids in a shipped q at most.
        draft_sample_method: `probabilistic` draws from q; `greedy` takes the argmax and ships a one-hot q.
        embeddings: folder or name of the target whose embeddings an EAGLE-3 head uses; unset means the target that the
            head's files name, or the embeddings that they hold.
        feature_window: positions with features of the target that an EAGLE-3 head looks back; unset means the head's
            own, or 64.
        prompt_lookup_min: shortest n-gram that is looked up.
        prompt_lookup_max: longest one.
        drain_s: seconds that SIGTERM leaves to open streams.
        ssl_certfile, ssl_keyfile: PEM files; both or neither.
        ssl_ca_certs: PEM file; with it clients must present a certificate of this authority.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = DRAFT_PORT
    device: str = "cpu"
    dtype: str = "auto"
    threads: int | None = None
    model_id: str | None = None
    revision: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_cache_tokens: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    trust_remote_code: bool = False
    max_slots: int = 16
    draft_top_k: int = 128
    draft_sample_method: SampleMethod = "probabilistic"
    embeddings: str | None = None
    feature_window: int | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    drain_s: float = 5.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidArgument("model", "is empty; a folder, 'ngram' or 'stub:...'")
        _between("port", self.port, 0, 65_535)
        _between("max_slots", self.max_slots, 1, 255)
        _between("draft_top_k", self.draft_top_k, 1, 1_024)
        _between("max_num_seqs", self.max_num_seqs, 1, 4_096)
        if self.feature_window is not None:
            _between("feature_window", self.feature_window, 1, 4_096)
        _between("prompt_lookup_min", self.prompt_lookup_min, 1, 32)
        _between("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, 32)
        if not 0 <= self.drain_s < float("inf"):
            raise InvalidArgument("drain_s", f"must be a number of seconds from 0 on, got {self.drain_s}")
        if self.draft_sample_method not in ("probabilistic", "greedy"):
            raise InvalidArgument("draft_sample_method", f"{self.draft_sample_method!r} is not probabilistic or greedy")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise InvalidArgument("ssl_keyfile", "certificate and key go together")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise InvalidArgument("ssl_ca_certs", "needs ssl_certfile and ssl_keyfile")

    @property
    def is_ngram(self) -> bool:
        return self.model == NGRAM


def parse(arguments: Sequence[str]) -> DraftConfig:
    """The configuration that a command line gives; exits with a usage message on an unknown or unreadable flag.

    Raises:
        InvalidArgument: naming the flag whose value is out of range.
    """
    parser = argparse.ArgumentParser(
        prog="python -m draft_service", description="Proposes tokens to a coordinator.", allow_abbrev=False
    )
    for field in fields(DraftConfig):
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            parser.add_argument(flag, dest=field.name, action="store_true", default=argparse.SUPPRESS)
            continue
        convert = next((kind for name, kind in _KINDS.items() if field.type.startswith(name)), str)
        parser.add_argument(
            flag, dest=field.name, type=convert, required=field.name == "model", default=argparse.SUPPRESS
        )
    return DraftConfig(**vars(parser.parse_args(arguments)))


_KINDS: dict[str, Any] = {"int": int, "float": float}


def _between(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(field, f"must be from {low} to {high}, got {value}")
