"""The coordinator's command line and the `coordinator` part of a file, as frozen configurations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from coordinator.api_keys import ApiKeys
from coordinator.config import MAX_GAMMA, DecoderConfig
from coordinator.flags import FORMS, flags
from coordinator.front import FrontConfig
from coordinator.gamma import SizeRange, size_ranges
from coordinator.options import Addresses, Options
from coordinator.prepare import Policy
from coordinator.schedule import read_schedule
from outrider import api_key, tracing
from outrider.configuration import settings
from outrider.configuration.kinds import of_action
from outrider.errors import InvalidArgument
from outrider.rpc.credentials import TlsFiles
from outrider.rpc.exposure import guard, host_of

_LARGEST_PAD = 1 << 16


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; a mistake ends the process with a message and status 2."""
    parser = flags()
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
            form=FORMS[given.wire_form],
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
