"""The configuration that both services share: frozen, every default written once, unknown keys refused."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from outrider.engine.config import Dtype, EngineConfig
from outrider.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """How a service runs; the flags have the same names with dashes.

    Attributes:
        model: folder of a causal LM, hub id, named model, or `stub:...`.
        host: address to listen on.
        port: 0 takes a free one.
        device: as in `EngineConfig`.
        dtype: as in `EngineConfig`.
        threads: torch threads; unset leaves torch's choice.
        model_id: name reported in GetInfo; unset means the folder's.
        revision: revision to fetch, and reported in GetInfo.
        max_model_len: positions of a stream at most; unset means the model's own limit.
        max_num_seqs: streams in one step.
        max_num_batched_tokens: token rows in one step.
        kv_cache_tokens: size of the KV pool in tokens; unset means from the memory plan.
        block_size: tokens per KV block; unset means the attention path's own.
        gpu_memory_utilization: share of the GPU's memory to use.
        trust_remote_code: whether the model folder may bring Python code.
        max_slots: drafted slots per item at most.
        drain_s: seconds that SIGTERM leaves to open streams.
        ssl_certfile, ssl_keyfile: PEM files; both or neither.
        ssl_ca_certs: PEM file; with it clients must present a certificate of this authority.
    """

    model: str
    port: int
    max_slots: int
    drain_s: float
    host: str = "127.0.0.1"
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
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidArgument("model", "is empty; a folder, a hub id, a named model or 'stub:...'")
        between("port", self.port, 0, 65_535)
        between("max_slots", self.max_slots, 1, 255)
        between("max_num_seqs", self.max_num_seqs, 1, 4_096)
        if not 0 <= self.drain_s < float("inf"):
            raise InvalidArgument("drain_s", f"must be a number of seconds from 0 on, got {self.drain_s}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise InvalidArgument("ssl_keyfile", "certificate and key go together")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise InvalidArgument("ssl_ca_certs", "needs ssl_certfile and ssl_keyfile")

    def engine(self) -> EngineConfig:
        """The engine's part of it.

        Raises:
            InvalidArgument: naming the field.
        """
        return EngineConfig(
            model=self.model,
            model_id=self.model_id,
            revision=self.revision,
            dtype=cast(Dtype, self.dtype),
            device=self.device,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_cache_tokens=self.kv_cache_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            gpu_memory_utilization=self.gpu_memory_utilization,
            threads=self.threads,
            trust_remote_code=self.trust_remote_code,
        )


Config = TypeVar("Config", bound=ServiceConfig)

_KINDS: dict[str, Any] = {"int": int, "float": float}


def parse(kind: type[Config], program: str, description: str, arguments: Sequence[str]) -> Config:
    """The configuration that a command line gives; exits with a usage message on an unknown or unreadable flag.

    Raises:
        InvalidArgument: naming the flag whose value is out of range.
    """
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    for field in fields(kind):
        flag, kind_name = "--" + field.name.replace("_", "-"), str(field.type)
        if kind_name == "bool":
            parser.add_argument(flag, dest=field.name, action="store_true", default=argparse.SUPPRESS)
            continue
        convert = next((convert for name, convert in _KINDS.items() if kind_name.startswith(name)), str)
        parser.add_argument(
            flag, dest=field.name, type=convert, required=field.name == "model", default=argparse.SUPPRESS
        )
    return kind(**vars(parser.parse_args(arguments)))


def between(field: str, value: int, low: int, high: int) -> None:
    """
    Raises:
        InvalidArgument: `value` is outside low .. high.
    """
    if not low <= value <= high:
        raise InvalidArgument(field, f"must be from {low} to {high}, got {value}")
