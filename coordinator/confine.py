"""Ray Serve's own port of a replica, kept to one address.

Each replica opens a port for calls between deployments. Serve binds it to all interfaces of the machine, asks nobody
for a password, and unpickles what comes in, so that whoever reaches it runs code here. Serve has no setting for it.
"""

from __future__ import annotations

from typing import Any

from ray.serve._private import replica as _replica

replica: Any = _replica
"""The module, whose inside has no types."""

_EVERYWHERE = "[::]"


def confine(host: str) -> None:
    """Has Serve bind to this address only; called in the replica's process, before Serve opens the port.

    Raises:
        AttributeError: this version of Ray opens the port in another way, which has to be looked at first.
    """
    opened = replica.add_port_to_grpc_server
    place = f"[{host}]" if ":" in host else host

    def add_port(server: Any, address: str) -> Any:
        return opened(server, address.replace(_EVERYWHERE, place))

    replica.add_port_to_grpc_server = add_port
