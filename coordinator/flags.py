"""The coordinator's flags: their names, defaults and help."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider import api_key, tracing
from outrider.log_format import LOG_FORMATS, TEXT
from outrider.rpc.options import COORDINATOR_PORT, TARGET_PORT
from outrider.sampling import Form

HTTP_PORT = 8000
FORMS = {"sparse": Form.SPARSE, "dense": Form.DENSE}


def flags() -> argparse.ArgumentParser:
    """The parser; each default stands here and nowhere else."""
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
    add("--ssl-certfile", help="PEM file with the certificate of both doors; read again when it changes")
    add("--ssl-keyfile", help="PEM file with its key")
    add("--ssl-ca-certs", help="PEM file with the clients' authority; clients without a certificate are refused")
    add("--link-ssl-ca-certs", help="PEM file with the services' authority: TLS on the links to draft and target")
    add("--link-ssl-certfile", help="PEM file with the certificate shown to the services")
    add("--link-ssl-keyfile", help="PEM file with its key")
    add("--insecure", action="store_true", help="plain text off loopback is meant: the network is trusted")
    add(
        "--api-key-file",
        help="file with a line for each API key, NAME KEY or NAME sha256:HEX; read again when it changes. One more key "
        f"may stand in the environment, {api_key.VARIABLE}",
    )
    add("--served-model-name", help="by which clients call the model; default: the target's own name")
    add("--num-speculative-tokens", "--gamma", type=_gamma, default="auto", help="drafted tokens per round, or auto")
    add(
        "--num-speculative-tokens-per-batch-size",
        metavar="JSON",
        help="[[first, last, gamma], ...]: gamma by the number of streams being decoded, in place of auto's own choice",
    )
    add("--schedule", type=Path, help="the same from a file, as `outrider bench sweep` writes it (schedule.json)")
    add("--max-num-speculative-tokens", type=int, default=8, help="what auto and requests may ask for at most")
    add(
        "--rejection-sample-method",
        choices=("auto", "standard", "coupled", "synthetic"),
        default="auto",
        help="acceptance rule; auto is coupled for requests with a seed, else standard; synthetic only measures",
    )
    add(
        "--synthetic-acceptance",
        type=float,
        metavar="RATE",
        help="under synthetic, and needed for it: chance of a drafted token to be accepted. The text means nothing",
    )
    add("--wire-form", choices=tuple(FORMS), default="sparse", help="what crosses the wire under the standard rule")
    add("--allow-vocab-mismatch", action="store_true", help="confine a draft of another vocabulary to agreeing ids")
    add("--self-draft", action="store_true", help="the target is meant to be its own draft")
    add(
        "--acceptance-baseline",
        type=float,
        metavar="RATE",
        help="share of rounds whose first drafted token is accepted when all is well; default: learnt at first",
    )
    add("--request-timeout-s", type=_seconds, default=600.0, help="a request ends after this many seconds")
    add("--drain-seconds", type=_seconds, default=30.0, help="seconds for running answers after SIGTERM")
    add(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="sampling defaults from the model's generation_config.json, or OpenAI's",
    )
    add("--chat-template", type=Path, help="file that replaces the model's chat template")
    add("--trust-request-chat-template", action="store_true", help="let requests bring chat templates of their own")
    add("--max-num-seqs", type=_positive, help="answers decoded at once; default: what the targets take together")
    add("--queue-factor", type=_positive, default=4, help="so many times as many may wait, of each API key")
    add("--stream-pacing-ms", type=_seconds, default=0.0, help="hide a stream's bursts: one write at every beat")
    add("--stream-pad", type=int, default=0, help="hide a stream's sizes: writes are multiples of so many bytes")
    add("--strict-fields", action="store_true", help="refuse unknown request fields")
    add("--allow-planted-errors", action="store_true", help="let requests ask for errors, to test `outrider verify`")
    add("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), default="INFO", help="what is logged")
    add("--log-format", choices=LOG_FORMATS, default=TEXT, help="json: one object per line, for machines")
    add(
        "--otlp-endpoint",
        metavar="URL",
        help=f"collector that gets traces by OTLP over gRPC; default: {tracing.VARIABLE}, and no traces without either",
    )
    add(
        "--trace-sample-rate",
        type=_rate,
        default=0.01,
        metavar="RATE",
        help="share of requests that are traced; a client that sends a traceparent decides for its own",
    )
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


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 <= rate <= 1:
        raise argparse.ArgumentTypeError("must be from 0 to 1")
    return rate


def _gamma(text: str) -> int | str:
    return text if text == "auto" else int(text)
