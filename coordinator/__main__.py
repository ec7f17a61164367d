"""`python -m coordinator`: starts a private Ray, the Serve application in it, and waits for a signal."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from coordinator.arguments import parse
from coordinator.gate import gate
from coordinator.options import Addresses, Options, open_to_strangers, url
from coordinator.ray_local import dead_process, local_ray
from outrider import api_key, log_format
from outrider.errors import OutriderError, Unavailable
from outrider.phases import announce
from outrider.ports import free_port
from outrider.rpc.files import raise_file_limit

logger = logging.getLogger("coordinator")

_POLL_S = 0.1
_WATCH_S = 0.5
_ANSWER_S = 5.0
_FAREWELL_S = 15.0
"""For the last frames to slow clients, and the last traces; a coordinator that takes longer is ended by Ray."""


def main() -> int:
    options = parse()
    os.environ.pop(api_key.VARIABLE, None)  # only its hash goes on, to no child process
    logging.basicConfig(
        level=options.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if options.log_format == log_format.JSON:
        log_format.write_json("coordinator", options.log_level)
    if open_to_strangers(options):
        logger.warning(
            "whoever reaches %s may use this API: there are no API keys (--api-key-file)", url(options.addresses)
        )
    signal.signal(signal.SIGTERM, _leave)
    raise_file_limit()
    try:
        addresses = _claim(options.addresses)
        announce("load", "starting Ray")
        with local_ray(bare_lines=options.log_format == log_format.JSON), ExitStack() as cleanup:
            inner = _behind_gate(addresses, cleanup) if addresses.tls.certfile else addresses
            code = _serve(replace(options, addresses=inner), url(addresses))
    except OutriderError as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _behind_gate(addresses: Addresses, cleanup: ExitStack) -> Addresses:
    """Opens the TLS gate at the HTTP door's address, and says where the plain door is to be."""
    inner = replace(addresses, http_host="127.0.0.1", port=_free_port("127.0.0.1", 0, "--port"))
    cleanup.enter_context(gate(addresses.tls, addresses.host, addresses.port, ("127.0.0.1", inner.port)))
    return inner


def _serve(options: Options, at: str) -> int:
    """Returns the exit code: 0 if every answer came to its end, 1 if some were cut short.

    Raises:
        Unavailable: a process of Ray has ended.
        KeyboardInterrupt: a second signal came.
    """
    from coordinator import serve  # imports Ray, whose settings are made by `local_ray`

    stop = _StopSignal()
    handle = serve.run(options)
    announce("load", "waiting for the target")
    ready, died = False, ""
    while not stop.wait(_WATCH_S if ready else _POLL_S) and not (died := dead_process()):
        if not ready and (status := serve.answer(handle.status.remote(), _ANSWER_S)) and not status.reason:
            ready = True
            announce("ready", f"{status.model} at {at}, gRPC port {status.grpc_port}")
    if died:
        logger.error("Ray's %s has ended; this coordinator ends with it", died)
    limit_s = options.drain_timeout_s
    logger.info("draining for up to %g s", limit_s)
    try:
        cut = serve.answer(handle.drain.remote(limit_s), limit_s + _FAREWELL_S)
    except KeyboardInterrupt:
        logger.warning("second signal: stopping at once")
        serve.answer(handle.hurry.remote(), _FAREWELL_S)
        raise
    if died:
        raise Unavailable(f"Ray's {died} has ended; start the coordinator again")
    if cut:
        logger.error("%d answers did not end within %g s; their clients got an error", cut, limit_s)
    return 0 if cut == 0 else 1


class _StopSignal:
    """The first SIGTERM or SIGINT asks to drain, every other one is a KeyboardInterrupt."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        # Ray installs handlers of its own when it starts, so these come after it.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the signal came within the time."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._asked.is_set() and (end is None or time.monotonic() < end):
            self._asked.wait(0.5 if end is None else max(0.0, end - time.monotonic()))
        return self._asked.is_set()

    def _handle(self, *_: Any) -> None:
        if self._asked.is_set():
            _leave()
        self._asked.set()


def _leave(*_: Any) -> None:
    raise KeyboardInterrupt


def _claim(addresses: Addresses) -> Addresses:
    """Free ports where none was named; Ray would report a busy one only in its log files.

    Raises:
        Unavailable: a port is taken, or the address is not this machine's.
    """
    return replace(
        addresses,
        port=_free_port(addresses.host, addresses.port, "--port"),
        grpc_port=_free_port(addresses.host, addresses.grpc_port, "--grpc-port"),
    )


def _free_port(host: str, port: int, flag: str) -> int:
    try:
        port = port or free_port(host)
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise Unavailable(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another port with {flag}"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
