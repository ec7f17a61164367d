"""The coordinator's command line, as frozen configurations; each default is written once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.api_keys import ApiKeys
from coordinator.config import MAX_GAMMA, DecoderConfig
from coordinator.front import FrontConfig
from coordinator.gamma import SizeRange, size_ranges
from coordinator.prepare import Policy
from coordinator.schedule import read_schedule
from outrider import api_key, tracing
from outrider.configuration import settings
from outrider.configuration.kinds import of_action
from outrider.errors import InvalidArgument
from outrider.log_format import LOG_FORMATS, TEXT
from outrider.rpc.credentials import PLAIN, TlsFiles
from outrider.rpc.exposure import guard, host_of, is_loopback
from outrider.rpc.options import COORDINATOR_PORT, TARGET_PORT
from outrider.sampling import Form

HTTP_PORT = 8000
_LARGEST_PAD = 1 << 16
_FORMS = {"sparse": Form.SPARSE, "dense": Form.DENSE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where the doors are; port 0 takes a free one.

    Attributes:
        tls: files of both doors; without a certificate they are plain text.
        http_host: where the plain HTTP door listens if not at `host`, because a gate with TLS stands before it.
    """

    host: str
    port: int
    grpc_port: int
    tls: TlsFiles = PLAIN
    http_host: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything the operator decides.

    Attributes:
        drain_timeout_s: how long running answers may go on after SIGTERM.
        log_level: of this process and its replica.
        log_format: text, or json: one object per line.
        otlp_endpoint: of the collector that gets traces, or None.
        trace_sample_rate: share of the requests without a trace context of their own that are traced.
    """

    decoder: DecoderConfig
    front: FrontConfig
    addresses: Addresses
    drain_timeout_s: float
    log_level: str
    log_format: str = TEXT
    otlp_endpoint: str | None = None
    trace_sample_rate: float = 0.0

    @property
    def grace_s(self) -> float:
        """Seconds that Serve leaves to a coordinator that is to go: no answer that may still run is cut off by it."""
        return max(self.drain_timeout_s, self.front.policy.request_timeout_s)


def open_to_strangers(options: Options) -> bool:
    """Whether others than this machine reach the doors, and none of them is asked for a key or a certificate."""
    doors, keys = options.addresses, options.front.api_keys
    return not (is_loopback(doors.host) or doors.tls.ca_certs or keys.of_file or keys.fixed)


def url(addresses: Addresses) -> str:
    """Where the API is."""
    host = f"[{addresses.host}]" if ":" in addresses.host else addresses.host
    return f"{'https' if addresses.tls.certfile else 'http'}://{host}:{addresses.port}/v1"


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; a mistake ends the process with a message and status 2."""
    parser = _parser()
    settings.add_flags(parser)
    parser.parse_args(arguments)  # --help and errors, with the defaults in place
    actions = {action.dest: action for action in parser._actions if action.dest not in settings.OWN}
    defaults = {key: action.default for key, action in actions.items()}
    for action in actions.values():
        action.default = argparse.SUPPRESS  # what is missing from the namespace was not given
    given = settings.split("coordinator", parser.parse_args(arguments))
    converters = {key: of_action(action) for key, action in actions.items()}
    file, faults = settings.converted(given, converters)

    def make(values: dict[str, Any]) -> Options:
        return _options(argparse.Namespace(**(defaults | values)))

    made, faults = settings.build(make, given, file, faults)
    if given.printing:
        settings.print_and_exit(settings.effective(defaults, file, given.flags), faults)
    if made is None:
        parser.error("\n".join(faults))
    return made


def _options(given: argparse.Namespace) -> Options:
    gamma = given.num_speculative_tokens
    links = TlsFiles(certfile=given.link_ssl_certfile, keyfile=given.link_ssl_keyfile, ca_certs=given.link_ssl_ca_certs)
    doors = TlsFiles(certfile=given.ssl_certfile, keyfile=given.ssl_keyfile, ca_certs=given.ssl_ca_certs)
    _check_exposure(given, links=links, doors=doors)
    decoder = DecoderConfig(
        target=tuple(given.target.split(",")),
        draft=None if given.draft == "none" else given.draft,
        num_speculative_tokens=gamma,
        num_speculative_tokens_per_batch_size=_ranges(given),
        max_num_speculative_tokens=given.max_num_speculative_tokens,
        request_timeout_s=given.request_timeout_s,
        allow_vocab_mismatch=given.allow_vocab_mismatch,
        self_draft=given.self_draft,
        acceptance_baseline=given.acceptance_baseline,
        tls=links,
    )
    front = FrontConfig(
        served_model_name=given.served_model_name,
        generation_config=given.generation_config,
        chat_template=given.chat_template.read_text("utf-8") if given.chat_template else None,
        max_speculative_tokens=decoder.largest_gamma,
        max_num_seqs=given.max_num_seqs,
        queue_factor=given.queue_factor,
        stream_pacing_s=given.stream_pacing_ms / 1_000,
        stream_pad=_within("stream_pad", given.stream_pad, _LARGEST_PAD),
        strict_fields=given.strict_fields,
        allow_planted_errors=given.allow_planted_errors,
        api_keys=ApiKeys.of(given.api_key_file, api_key.from_environment()),
        policy=Policy(
            rejection_sample_method=given.rejection_sample_method,
            synthetic_acceptance=given.synthetic_acceptance,
            form=_FORMS[given.wire_form],
            request_timeout_s=given.request_timeout_s,
            trust_request_chat_template=given.trust_request_chat_template,
        ),
    )
    addresses = Addresses(host=given.host, port=given.port, grpc_port=given.grpc_port, tls=doors)
    return Options(
        decoder=decoder,
        front=front,
        addresses=addresses,
        drain_timeout_s=given.drain_seconds,
        log_level=given.log_level,
        log_format=given.log_format,
        otlp_endpoint=tracing.endpoint(given.otlp_endpoint),
        trace_sample_rate=given.trace_sample_rate,
    )


def _check_exposure(given: argparse.Namespace, *, links: TlsFiles, doors: TlsFiles) -> None:
    if doors.ca_certs is not None and doors.certfile is None:
        raise InvalidArgument("ssl_ca_certs", "needs ssl_certfile and ssl_keyfile")
    links.check()
    doors.check()
    remedy = "ssl_certfile and ssl_keyfile"
    guard("host", given.host, encrypted=doors.certfile is not None, insecure=given.insecure, remedy=remedy)
    peers = [("target", address) for address in given.target.split(",")]
    for field, address in [*peers, ("draft", given.draft)]:
        if address != "none":
            host = host_of(address)
            guard(field, host, encrypted=bool(links), insecure=given.insecure, remedy="link_ssl_ca_certs")


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
    add("--wire-form", choices=tuple(_FORMS), default="sparse", help="what crosses the wire under the standard rule")
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


def _ranges(given: argparse.Namespace) -> tuple[SizeRange, ...]:
    """
    Raises:
        InvalidArgument: unreadable, or both ways of giving the table are used.
    """
    text, name = given.num_speculative_tokens_per_batch_size, "num_speculative_tokens_per_batch_size"
    if given.schedule is not None:
        if text is not None:
            raise InvalidArgument("schedule", f"gives {name}, which is given as well")
        return read_schedule(given.schedule, MAX_GAMMA)
    if text is None:
        return ()
    try:
        table = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(name, f"is not JSON: {error}") from None
    return size_ranges(table, MAX_GAMMA)


def _within(field: str, value: int, most: int) -> int:
    if not 0 <= value <= most:
        raise InvalidArgument(field, f"must be from 0 to {most}, got {value}")
    return value


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
