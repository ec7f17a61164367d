"""The draft service as a whole: it picks the kind of draft. Used by `__main__` and by Ray alike."""

from __future__ import annotations

from collections.abc import Callable

from draft_service.config import DraftConfig
from draft_service.kinds import HEADS, LOOKUPS, Kind, kind_of
from draft_service.servicer import Backend, DraftServicer
from outrider.dummy import LOAD_FORMAT
from outrider.errors import InvalidArgument
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
    kind = kind_of(config)
    if config.load_format == LOAD_FORMAT and kind is not Kind.CAUSAL_LM:
        what = "heads with dummy weights are not built" if kind in HEADS else "it has no weights that could be made up"
        raise InvalidArgument("load_format", f"{config.model}: {what}; take a causal LM")
    if kind in LOOKUPS:
        from draft_service.lookup_backend import LookupBackend

        return LookupBackend(config, lease_s)
    # Here and not above: a lookup draft starts in a fraction of the time that importing torch takes.
    if kind in HEADS:
        from draft_service.head_backend import HeadBackend

        return HeadBackend(config, on_fatal, lease_s)
    from draft_service.model_backend import ModelBackend

    return ModelBackend(config, on_fatal, lease_s)
