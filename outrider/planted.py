"""Errors on purpose, to show that `outrider verify` catches them.

Each is a mistake that has shipped in a public engine. A request names one in `speculative.planted_error`, and it is
refused unless coordinator, target and draft were all started with `--allow-planted-errors`. The hooks: both of the
coordinator's in `coordinator/planted.py`, the draft's in `draft_service/planted.py`, the target's in
`target_service/planted.py`.
"""

from __future__ import annotations

from enum import IntEnum


class Plant(IntEnum):
    """Which error; the values travel in `StreamOpen`."""

    NONE = 0
    SHARED_NOISE = 1
    """The coordinator tests x_i with the very word that the draft drew it with."""
    RAW_Q = 2
    """The draft takes the argmax and declares the distribution that it did not draw from."""
    ROW_SHIFT = 3
    """The target judges slot i by row i + 1, the one behind its token."""
    DROP_AFTER_LOOK = 4
    """The coordinator throws a drafted token away because q(x) < .2, and has its slot drawn from p."""

    @property
    def label(self) -> str:
        """As requests and the command line spell it."""
        return self.name.lower().replace("_", "-")

    @classmethod
    def of(cls, label: str | None) -> Plant:
        """The error of this label; NONE for None.

        Raises:
            KeyError: there is no such error.
        """
        return cls.NONE if label is None else cls[label.upper().replace("-", "_")]


PLANTS = tuple(plant.label for plant in Plant if plant is not Plant.NONE)
LOOKED_AT_BELOW = 0.2
"""q(x) below which DROP_AFTER_LOOK drops x."""
