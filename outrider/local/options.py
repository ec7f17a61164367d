"""StackOptions: what `outrider up` and all that start a stack of their own take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider import dummy, models
from outrider.rpc.credentials import PLAIN, TlsFiles
from outrider.rpc.exposure import guard
from outrider.rpc.options import COORDINATOR_PORT, DRAFT_PORT, TARGET_PORT

HTTP_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What `outrider up` takes; ports of 0 are chosen freely.

    Attributes:
        draft: model name, "mtp" (the target's own MTP layer), "ngram", "suffix", or "none" for no speculation.
        target_device, draft_device: nvidia-smi numbers, UUIDs, "cpu" or "auto".
        dtype, draft_dtype: number formats; an unset draft_dtype means the target's.
        config: file whose further settings the parts read themselves.
        num_speculative_tokens: "auto" or a number of drafted tokens per round.
        schedule: file with drafted tokens by batch size, as `outrider bench sweep` writes it, or None.
        allow_planted_errors: whether requests may ask for errors on purpose, to test `outrider verify`.
        load_format: "dummy" measures shapes without weights: `config.json` alone, random weights.
        tls: files of the API's TLS; without a certificate it is plain text.
        links: files of the coordinator's TLS towards the services, whose own are in `config`.
        insecure: whether plain text is meant although `host` is not loopback.
        api_key_file: with the keys that clients must show; one more may stand in the environment (`outrider.api_key`).
        profile_seconds: what each service spends on measuring its steps while idle; None leaves it to the services.
        start_timeout_s: seconds after which parts that do not serve yet are given up.
    """

    target: str = "default"
    draft: str = "default"
    target_device: str = "auto"
    draft_device: str = "auto"
    dtype: str = "auto"
    draft_dtype: str | None = None
    config: str | None = None
    max_model_len: int | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = HTTP_PORT
    grpc_port: int = COORDINATOR_PORT
    draft_port: int = DRAFT_PORT
    target_port: int = TARGET_PORT
    num_speculative_tokens: str = "auto"
    schedule: Path | None = None
    load_format: str = "auto"
    profile_seconds: float | None = None
    rejection_sample_method: str = "auto"
    revision: str | None = None
    draft_revision: str | None = None
    allow_vocab_mismatch: bool = False
    allow_planted_errors: bool = False
    tls: TlsFiles = PLAIN
    links: TlsFiles = PLAIN
    insecure: bool = False
    api_key_file: str | None = None
    start_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        encrypted = self.tls.certfile is not None
        remedy = "ssl_certfile and ssl_keyfile"
        guard("host", self.host, encrypted=encrypted, insecure=self.insecure, remedy=remedy)
        self.tls.check()


def is_dummy(options: StackOptions, name: str) -> bool:
    """Whether a model gets random weights from its `config.json`."""
    return options.load_format == dummy.LOAD_FORMAT and not _has_no_weights(name)


def _has_no_weights(name: str) -> bool:
    return name.startswith(models.STUB_PREFIX) or name in models.LOOKUP_DRAFTS


def scheme(options: StackOptions) -> str:
    """Of the API's URL."""
    return "http" if options.tls.certfile is None else "https"
