"""The target service as a whole. Used by `__main__` and by Ray alike."""

from __future__ import annotations

from outrider.rpc.info import new_instance_id
from outrider.rpc.options import LEASE_S, TARGET_SERVICE_NAME
from outrider.service.service import Service
from target_service.config import TargetConfig
from target_service.servicer import TargetServicer


class TargetService(Service):
    """One target service in this process.

    Args:
        config: of the service.
        lease_s: how long a lost link's streams are kept.
    """

    def __init__(self, config: TargetConfig, lease_s: float = LEASE_S) -> None:
        # Not at the top: whoever launches the service pins the BLAS before torch is imported.
        from target_service.backend import Backend

        super().__init__(config, TARGET_SERVICE_NAME)
        backend = Backend(config, self.on_fatal, lease_s)
        servicer = TargetServicer(
            backend,
            instance_id=new_instance_id(),
            max_num_seqs=config.max_num_seqs,
            max_slots=config.max_slots,
            lease_s=lease_s,
        )
        self.host(backend, servicer)
