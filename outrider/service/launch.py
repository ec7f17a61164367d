"""A service as a process: `python -m draft_service` and `python -m target_service`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from outrider import dummy, log_format, models, phases
from outrider.errors import InvalidArgument, OutriderError
from outrider.local import devices
from outrider.rpc.files import raise_file_limit
from outrider.rpc.server import run
from outrider.service import cards
from outrider.service.config import Config
from outrider.service.environment import set_environment
from outrider.service.service import Service


def launch(role: models.Role, read: Callable[[list[str]], Config], make: Callable[[Config], Service]) -> int:
    """Read the command line, have the model on this machine, serve until a signal; returns the exit code."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s"
    )
    log = logging.getLogger(f"{role}_service")
    set_environment()
    raise_file_limit()
    try:
        config = read(sys.argv[1:])
        check_token(os.environ)
        given = cards.check(config.device, devices.cards() if config.device != "cpu" else (), os.environ)
    except OutriderError as error:
        log.error("%s", error)
        return 2
    if config.log_format == log_format.JSON:
        log_format.write_json(role)
    if given is not None:
        log.info("%s", given.line)
        config = replace(config, device=given.device)
    phases.announce("resolve", config.model)
    try:
        config = located(config, role)
    except OutriderError as error:
        log.error("%s", error)
        return 1
    return run(_serve(make, config))


def located(config: Config, role: models.Role) -> Config:
    """The configuration with the model's folder on this machine, fetched if need be, in the place of its name.

    Raises:
        ModelUnavailable: it could not be had.
    """
    if config.load_format == dummy.LOAD_FORMAT:
        found = dummy.resolve(config.model, role)
    else:
        found = models.resolve(config.model, revision=config.revision, role=role, remote_code=config.trust_remote_code)
    if found.folder is None:
        return config
    return replace(
        config,
        model=found.path,
        model_id=config.model_id or found.model_id,
        revision=config.revision or found.revision or None,
    )


def check_token(environ: Mapping[str, str]) -> None:
    """
    Raises:
        InvalidArgument: the hub's token is in a file that this user cannot read, as it is easily the case with a secret
            that is mounted into a container.
    """
    path = environ.get("HF_TOKEN_PATH")
    if path and os.path.exists(path) and not os.access(path, os.R_OK):
        raise InvalidArgument("HF_TOKEN_PATH", f"{path} cannot be read by user {os.getuid()}, who runs this service")


async def _serve(make: Callable[[Config], Service], config: Config) -> None:
    """Start, load, serve, drain."""
    service = make(config)
    await service.start()
    try:
        await service.ready()
        await service.run()
    except BaseException:
        await service.stop()
        raise
