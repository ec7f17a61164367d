"""`python -m draft_service --model FOLDER|ngram|stub:...`: see `config.DraftConfig` for the flags."""

from __future__ import annotations

import logging
import sys

from draft_service.config import DraftConfig, parse
from draft_service.service import DraftService
from outrider.engine.blas import pin_blas
from outrider.errors import OutriderError
from outrider.rpc.server import run


async def serve(config: DraftConfig) -> None:
    """Start, load, serve, drain."""
    service = DraftService(config)
    await service.start()
    try:
        await service.ready()
        await service.run()
    except BaseException:
        await service.stop()
        raise


def main() -> int:
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s draft %(levelname)s %(name)s: %(message)s"
    )
    pin_blas()
    try:
        config = parse(sys.argv[1:])
    except OutriderError as error:
        logging.getLogger("draft_service").error("%s", error)
        return 2
    return run(serve(config))


if __name__ == "__main__":
    sys.exit(main())
