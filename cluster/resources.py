"""Resources of an actor as Ray takes them, read from what an operator writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from outrider.errors import InvalidArgument

_ACCELERATOR = "accelerator_type"
_ACCELERATOR_SHARE = 0.001
"""Ray stands for the kind of a node's accelerators by a resource of amount 1, of which an actor takes this much."""

_IN_A_GROUP = "_group_"
"""In the names of resources that belong to a placement group."""

Resources = Mapping[str, float]


def parse(field: str, value: str | Mapping[str, Any]) -> dict[str, float]:
    """`{"CPU": 4, "GPU": 1, "memory": 8e9, "accelerator_type": "H100", "my-resource": 1}`.

    Args:
        field: named in errors.
        value: a JSON object, as text or read already.

    Raises:
        InvalidArgument: it is no such object, or asks for nothing.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise InvalidArgument(field, f"is no JSON ({error})") from None
    if not isinstance(value, Mapping):
        raise InvalidArgument(field, f'must be an object such as {{"GPU": 1}}, got {json.dumps(value)}')
    found = {}
    for name, amount in value.items():
        if name == _ACCELERATOR:
            if not isinstance(amount, str) or not amount:
                raise InvalidArgument(field, f"{name} must be a name such as H100, got {amount!r}")
            found[f"{name}:{amount}"] = _ACCELERATOR_SHARE
            continue
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < math.inf:
            raise InvalidArgument(field, f"{name} must be a number from 0 on, got {amount!r}")
        if name == "GPU" and amount > 1 and amount != int(amount):
            raise InvalidArgument(field, f"GPU must be a whole number above 1, got {amount}")
        if amount:
            found[name] = float(amount)
    if not found:
        raise InvalidArgument(field, "asks for nothing; a service takes at least a CPU, a GPU or a custom resource")
    return found


def actor_options(resources: Resources) -> dict[str, Any]:
    """As keyword arguments of Ray's `options` and of Serve's `ray_actor_options`."""
    custom = dict(resources)
    options: dict[str, Any] = {"num_cpus": custom.pop("CPU", 0), "num_gpus": custom.pop("GPU", 0)}
    if "memory" in custom:
        options["memory"] = custom.pop("memory")
    return {**options, "resources": custom}


def device(resources: Resources) -> str:
    """The device flag of a service that holds these; Ray shows an actor the GPUs that it was given and no others."""
    gpus = resources.get("GPU", 0.0)
    if not gpus:
        return "cpu"
    return "cuda:0" if gpus <= 1 else "auto"


def fit(wanted: Resources, free: Resources) -> bool:
    """Whether there is enough of everything."""
    return all(free.get(name, 0.0) >= amount for name, amount in wanted.items())


def describe(resources: Resources) -> str:
    """For people: `CPU 4, GPU 1, memory 8.0 GiB`; without the entries that Ray makes for its own use."""
    shown = []
    for name, amount in sorted(resources.items()):
        if name in ("memory", "object_store_memory"):
            if name == "memory":
                shown.append(f"memory {amount / (1 << 30):.1f} GiB")
        elif name.startswith(f"{_ACCELERATOR}:"):
            shown.append(name.partition(":")[2])
        elif not name.startswith("node:") and _IN_A_GROUP not in name:
            shown.append(f"{name} {amount:g}")
    return ", ".join(shown) or "nothing"
