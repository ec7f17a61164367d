"""`python -m target_service --model FOLDER|stub:...`: see `config.TargetConfig` for the flags."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

from outrider import models, phases
from outrider.engine.blas import pin_blas
from outrider.errors import OutriderError
from outrider.rpc.server import run
from target_service.config import TargetConfig, parse
from target_service.service import TargetService


async def serve(config: TargetConfig) -> None:
    """Start, load, serve, drain."""
    service = TargetService(config)
    await service.start()
    try:
        await service.ready()
        await service.run()
    except BaseException:
        await service.stop()
        raise


def main() -> int:
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s target %(levelname)s %(name)s: %(message)s"
    )
    log = logging.getLogger("target_service")
    pin_blas()
    try:
        config = parse(sys.argv[1:])
    except OutriderError as error:
        log.error("%s", error)
        return 2
    phases.announce("resolve", config.model)
    try:
        found = models.resolve(
            config.model, revision=config.revision, role="target", remote_code=config.trust_remote_code
        )
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
    return run(serve(config))


if __name__ == "__main__":
    sys.exit(main())
