"""The draft service as a whole: it picks the kind of draft. Used by `__main__` and by Ray alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from draft_service.config import DraftConfig
from draft_service.servicer import Backend, DraftServicer
from outrider.dummy import LOAD_FORMAT
from outrider.errors import InvalidArgument
from outrider.models import STUB_PREFIX
from outrider.rpc.info import new_instance_id
from outrider.rpc.options import DRAFT_SERVICE_NAME, LEASE_S
from outrider.service.service import Service


class DraftService(Service):
    """One draft service in this process.

    Args:
        config: of the service.
        lease_s: how long a lost link's streams are kept.
    """

    def __init__(self, config: DraftConfig, lease_s: float = LEASE_S) -> None:
        super().__init__(config, DRAFT_SERVICE_NAME)
        backend = _backend(config, self.on_fatal, lease_s)
        servicer = DraftServicer(
            backend,
            instance_id=new_instance_id(),
            max_num_seqs=config.max_num_seqs,
            max_slots=config.max_slots,
            lease_s=lease_s,
        )
        self.host(backend, servicer)


def _backend(config: DraftConfig, on_fatal: Callable[[BaseException], None], lease_s: float) -> Backend:
    if config.load_format == LOAD_FORMAT and (config.is_lookup or config.model.startswith(STUB_PREFIX)):
        raise InvalidArgument("load_format", f"{config.model} has no weights that could be made up")
    if config.is_lookup:
        from draft_service.lookup_backend import LookupBackend

        return LookupBackend(config, lease_s)
    # Here and not above: a lookup draft starts in a fraction of the time that importing torch takes.
    from draft_service.eagle3_backend import Eagle3Backend
    from draft_service.model_backend import ModelBackend
    from outrider.engine.eagle3_loader import is_head
    from outrider.engine.stub import is_stub

    if not is_stub(config.model) and is_head(Path(config.model)):
        if config.load_format == LOAD_FORMAT:
            raise InvalidArgument("load_format", "an EAGLE-3 head with dummy weights is not built; take a causal LM")
        return Eagle3Backend(config, on_fatal, lease_s)
    return ModelBackend(config, on_fatal, lease_s)
