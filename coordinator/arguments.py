"""The coordinator's command line, as frozen configurations; each default is written once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.config import DecoderConfig
from coordinator.front import FrontConfig
from coordinator.prepare import Policy
from outrider.errors import InvalidArgument
from outrider.rpc.options import COORDINATOR_PORT, TARGET_PORT
from outrider.sampling import Form

HTTP_PORT = 8000
_FORMS = {"sparse": Form.SPARSE, "dense": Form.DENSE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where the doors are; port 0 takes a free one."""

    host: str
    port: int
    grpc_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything the operator decides.

    Attributes:
        drain_timeout_s: how long running answers may go on after SIGTERM.
        log_level: of this process and its replica.
    """

    decoder: DecoderConfig
    front: FrontConfig
    addresses: Addresses
    drain_timeout_s: float
    log_level: str


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; a mistake ends the process with a message and status 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return _options(given)
    except (InvalidArgument, OSError) as error:
        parser.error(str(error))


def _options(given: argparse.Namespace) -> Options:
    gamma = given.num_speculative_tokens
    decoder = DecoderConfig(
        target=tuple(given.target.split(",")),
        draft=None if given.draft == "none" else given.draft,
        num_speculative_tokens=gamma,
        max_num_speculative_tokens=given.max_num_speculative_tokens,
        request_timeout_s=given.request_timeout_s,
        allow_vocab_mismatch=given.allow_vocab_mismatch,
        self_draft=given.self_draft,
    )
    front = FrontConfig(
        served_model_name=given.served_model_name,
        generation_config=given.generation_config,
        chat_template=given.chat_template.read_text("utf-8") if given.chat_template else None,
        max_speculative_tokens=decoder.largest_gamma,
        max_num_seqs=given.max_num_seqs,
        queue_factor=given.queue_factor,
        strict_fields=given.strict_fields,
        policy=Policy(
            rejection_sample_method=given.rejection_sample_method,
            form=_FORMS[given.wire_form],
            request_timeout_s=given.request_timeout_s,
        ),
    )
    addresses = Addresses(host=given.host, port=given.port, grpc_port=given.grpc_port)
    return Options(
        decoder=decoder,
        front=front,
        addresses=addresses,
        drain_timeout_s=given.drain_timeout_s,
        log_level=given.log_level,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator",
        description="Serves the OpenAI API and gRPC Generate from a target service and, for speed, a draft service.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--target", default=f"127.0.0.1:{TARGET_PORT}", help="HOST:PORT of the target; several separated by commas")
    add("--draft", default="none", help="HOST:PORT of the draft service, or none")
    add("--host", default="127.0.0.1", help="address that both doors listen on")
    add("--port", type=_port, default=HTTP_PORT, help="of the HTTP door; 0 takes a free one")
    add("--grpc-port", type=_port, default=COORDINATOR_PORT, help="of the gRPC door; 0 takes a free one")
    add("--served-model-name", help="by which clients call the model; default: the target's own name")
    add("--num-speculative-tokens", "--gamma", type=_gamma, default="auto", help="drafted tokens per round, or auto")
    add("--max-num-speculative-tokens", type=int, default=8, help="what auto and requests may ask for at most")
    add(
        "--rejection-sample-method",
        choices=("auto", "standard", "coupled"),
        default="auto",
        help="acceptance rule; auto is coupled for requests with a seed, else standard",
    )
    add("--wire-form", choices=tuple(_FORMS), default="sparse", help="what crosses the wire under the standard rule")
    add("--allow-vocab-mismatch", action="store_true", help="confine a draft of another vocabulary to agreeing ids")
    add("--self-draft", action="store_true", help="the target is meant to be its own draft")
    add("--request-timeout-s", type=_seconds, default=600.0, help="a request ends after this many seconds")
    add("--drain-timeout-s", type=_seconds, default=30.0, help="seconds for running answers after SIGTERM")
    add(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="sampling defaults from the model's generation_config.json, or OpenAI's",
    )
    add("--chat-template", type=Path, help="file that replaces the model's chat template")
    add("--max-num-seqs", type=_positive, help="answers decoded at once; default: the target's number")
    add("--queue-factor", type=_positive, default=4, help="so many times as many may wait; others get 429")
    add("--strict-fields", action="store_true", help="refuse unknown request fields")
    add("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), default="INFO", help="what is logged")
    return parser


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 65_536:
        raise argparse.ArgumentTypeError(f"{port} is not a port")
    return port


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of seconds")
    return seconds


def _gamma(text: str) -> int | str:
    return text if text == "auto" else int(text)
