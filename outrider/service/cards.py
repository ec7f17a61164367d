"""The GPUs that a service was given: checked and said in one line before anything is downloaded or loaded."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from outrider.errors import InvalidArgument
from outrider.local.devices import Card, pick

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_AMD_DEVICE = Path("/dev/kfd")
_GIB = 1 << 30
_REMEDY = (
    "a container needs the NVIDIA Container Toolkit on its host and the cards given to it (docker run --gpus all; in "
    "Compose a device reservation); else choose device cpu"
)


def number_as_listed(environ: MutableMapping[str, str]) -> None:
    """Has CUDA number cards by bus, as nvidia-smi does, and not by speed; for launchers, before torch is imported."""
    environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


class Given(NamedTuple):
    """What a service may use.

    Attributes:
        device: what its `device` setting comes to: `auto` on a single card is that card.
        line: for the log.
    """

    device: str
    line: str


def check(device: str, available: Sequence[Card], environ: Mapping[str, str]) -> Given | None:
    """Whether the cards that CUDA_VISIBLE_DEVICES names are there; None where no card is asked for.

    Args:
        device: as in `EngineConfig`.
        available: the cards that nvidia-smi lists.
        environ: the process's environment.

    Raises:
        InvalidArgument: there is no driver, or a named card is not there; lists those that are.
    """
    if device == "cpu":
        return None
    named = environ.get(VISIBLE)
    if not available:
        if _DRIVER_FILE.exists() or _AMD_DEVICE.exists():
            return Given(
                device, "the GPUs cannot be listed (no nvidia-smi that works); torch will find them or say why"
            )
        raise InvalidArgument("device", f"{device!r} is asked for, but no NVIDIA driver is to be seen here: {_REMEDY}")
    if named is not None and named.strip() in ("", "-1"):
        raise InvalidArgument("device", f"{device!r} is asked for, but {VISIBLE} is {named!r} and hides every GPU")
    if named is not None and "MIG-" in named:
        return Given(device, f"{VISIBLE}={named}, driver {available[0].driver}")
    chosen = tuple(available) if named is None else pick(VISIBLE, named, available) or ()
    listed = ", ".join(
        f"{card.index} {card.name} ({card.free_bytes / _GIB:.1f} of {card.total_bytes / _GIB:.1f} GiB free)"
        for card in chosen
    )
    line = f"{len(chosen)} of {len(available)} GPUs, driver {chosen[0].driver}: {listed}"
    return Given("cuda:0" if device == "auto" and len(chosen) == 1 else device, line)
