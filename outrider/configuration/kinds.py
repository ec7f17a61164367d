"""What a value in the file must be, by the type of the field or flag that it sets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any


def converter(kind: str) -> Callable[[Any], Any]:
    """For a dataclass field, by its annotation as text, for example `int | None`."""
    optional = kind.endswith("| None")
    base = kind.removesuffix("| None").strip()
    check = {"int": _integer, "float": _number, "bool": _flag}.get(base, _text)
    return lambda value: None if value is None and optional else check(value)


def of_action(action: argparse.Action) -> Callable[[Any], Any]:
    """For an argparse flag: the same conversion and choices as on the command line."""

    def convert(value: Any) -> Any:
        if action.nargs == 0:
            return _flag(value)
        if value is None:
            raise ValueError("must have a value; leave the line out for the default")
        if isinstance(value, list):
            nested = any(isinstance(one, list) for one in value)
            value = json.dumps(value) if nested else ",".join(str(one) for one in value)
        if isinstance(value, bool | dict):
            raise ValueError(f"must be a single value, got {value!r}")
        made = action.type(str(value)) if callable(action.type) else str(value)
        if action.choices is not None and made not in action.choices:
            raise ValueError(f"must be one of {', '.join(map(str, action.choices))}, got {value!r}")
        return made

    return convert


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number, got {value!r}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number, got {value!r}")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {value!r}")
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be a text, got {value!r}")
    return str(value)
