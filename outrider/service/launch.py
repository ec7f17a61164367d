"""A service as a process: `python -m draft_service` and `python -m target_service`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace

from outrider import models, phases
from outrider.engine.blas import pin_blas
from outrider.errors import OutriderError
from outrider.rpc.server import run
from outrider.service.config import Config
from outrider.service.service import Service


def launch(role: models.Role, read: Callable[[list[str]], Config], make: Callable[[Config], Service]) -> int:
    """Read the command line, have the model on this machine, serve until a signal; returns the exit code."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s"
    )
    log = logging.getLogger(f"{role}_service")
    pin_blas()
    try:
        config = read(sys.argv[1:])
    except OutriderError as error:
        log.error("%s", error)
        return 2
    phases.announce("resolve", config.model)
    try:
        found = models.resolve(config.model, revision=config.revision, role=role, remote_code=config.trust_remote_code)
    except OutriderError as error:
        log.error("%s", error)
        return 1
    if found.folder is not None:
        config = replace(
            config,
            model=found.path,
            model_id=config.model_id or found.model_id,
            revision=config.revision or found.revision or None,
        )
    return run(_serve(make, config))


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
