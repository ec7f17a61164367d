"""The configuration that both services share: frozen, every default written once, unknown keys refused."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, cast

from outrider import tracing
from outrider.configuration import settings
from outrider.configuration.document import Setting
from outrider.configuration.kinds import converter
from outrider.engine.config import Dtype, EngineConfig
from outrider.errors import InvalidArgument
from outrider.log_format import LOG_FORMATS, TEXT
from outrider.rpc.credentials import TlsFiles
from outrider.rpc.exposure import guard


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
        enforce_eager, max_cudagraph_capture_size, compile: as in `EngineConfig`.
        no_prefix_caching: computes every prompt from the start, instead of sharing the KV of a prefix that is known.
        trust_remote_code: whether the model folder may bring Python code.
        max_slots: drafted slots per item at most.
        load_format: as in `EngineConfig`.
        profile_seconds: to spend on measuring what steps cost while there is nothing else to do; what was measured is
            kept on disk for the next start. 0 measures nothing.
        drain_seconds: seconds that SIGTERM leaves to open streams.
        ssl_certfile, ssl_keyfile: PEM files; both or neither. They are read again when they change.
        ssl_ca_certs: PEM file; with it clients must present a certificate of this authority.
        insecure: whether plain text is meant although `host` is not loopback.
        allow_planted_errors: whether streams may ask for errors on purpose, to test `outrider verify`.
        log_format: text, or json: one object per line.
        otlp_endpoint: collector that gets the spans of traced streams by OTLP over gRPC; unset means that of the
            variable OTEL_EXPORTER_OTLP_ENDPOINT, and without either there are none.
    """

    model: str
    port: int
    max_slots: int
    drain_seconds: float
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
    enforce_eager: bool = False
    compile: bool = False
    max_cudagraph_capture_size: int | None = None
    no_prefix_caching: bool = False
    trust_remote_code: bool = False
    load_format: str = "auto"
    profile_seconds: float = 20.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    insecure: bool = False
    allow_planted_errors: bool = False
    log_format: str = TEXT
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidArgument("model", "is empty; a folder, a hub id, a named model or 'stub:...'")
        between("port", self.port, 0, 65_535)
        between("max_slots", self.max_slots, 1, 255)
        between("max_num_seqs", self.max_num_seqs, 1, 4_096)
        if not 0 <= self.drain_seconds < float("inf"):
            raise InvalidArgument("drain_seconds", f"must be a number of seconds from 0 on, got {self.drain_seconds}")
        if not 0 <= self.profile_seconds < float("inf"):
            raise InvalidArgument("profile_seconds", f"must be a number from 0 on, got {self.profile_seconds}")
        if self.log_format not in LOG_FORMATS:
            raise InvalidArgument("log_format", f"must be one of {', '.join(LOG_FORMATS)}, got {self.log_format!r}")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise InvalidArgument("ssl_ca_certs", "needs ssl_certfile and ssl_keyfile")
        tracing.endpoint(self.otlp_endpoint)
        encrypted = self.tls.certfile is not None
        remedy = "ssl_certfile and ssl_keyfile"
        guard("host", self.host, encrypted=encrypted, insecure=self.insecure, remedy=remedy)

    @property
    def tls(self) -> TlsFiles:
        """The files of the server's TLS; without a certificate it serves plain text."""
        return TlsFiles(certfile=self.ssl_certfile, keyfile=self.ssl_keyfile, ca_certs=self.ssl_ca_certs)

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
            enforce_eager=self.enforce_eager,
            compile=self.compile,
            max_cudagraph_capture_size=self.max_cudagraph_capture_size,
            threads=self.threads,
            trust_remote_code=self.trust_remote_code,
            load_format=self.load_format,
        )


Config = TypeVar("Config", bound=ServiceConfig)

_KINDS: dict[str, Any] = {"int": int, "float": float}


def parse(kind: type[Config], section: str, program: str, description: str, arguments: Sequence[str]) -> Config:
    """The configuration that a command line gives; exits with a usage message on an unknown or unreadable flag.

    Args:
        section: of the configuration file that `--config` names.

    Raises:
        BadConfiguration: lists all values that are out of range, and all faults of the file.
    """
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    settings.add_flags(parser)
    for field in fields(kind):
        flag, kind_name = "--" + field.name.replace("_", "-"), str(field.type)
        if kind_name == "bool":
            parser.add_argument(flag, dest=field.name, action="store_true", default=argparse.SUPPRESS)
            continue
        convert = next((convert for name, convert in _KINDS.items() if kind_name.startswith(name)), str)
        parser.add_argument(flag, dest=field.name, type=convert, default=argparse.SUPPRESS)
    given = settings.split(section, parser.parse_args(arguments))
    converters = {field.name: converter(str(field.type)) for field in fields(kind)}
    file, faults = settings.converted(given, converters)
    if "model" not in file and "model" not in given.flags:
        if not given.prefix and not given.printing:
            parser.error("the following arguments are required: --model (or --config)")
        faults.append(f"{given.prefix}model: is required: a folder, a hub id, a named model or 'stub:...'")
        file["model"] = Setting("stub:", "unset")  # so that the other values are checked too
    made, faults = settings.build(lambda values: kind(**values), given, file, faults)
    if given.printing:
        defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
        settings.print_and_exit(settings.effective(defaults, file, given.flags), faults)
    settings.complain(faults)
    assert made is not None
    return made


def between(field: str, value: int, low: int, high: int) -> None:
    """
    Raises:
        InvalidArgument: `value` is outside low .. high.
    """
    if not low <= value <= high:
        raise InvalidArgument(field, f"must be from {low} to {high}, got {value}")
