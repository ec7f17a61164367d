"""From a section and a command line to effective settings. Flags win over the file, the file over defaults."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from outrider.configuration.document import BadConfiguration, Setting, read, unknown
from outrider.errors import InvalidArgument

OWN = ("help", "config", "print_config")
"""Keys of flags that are no settings."""

PRINT_FLAG = "--print-config"
_Made = TypeVar("_Made")


class Given(NamedTuple):
    """What a command line says.

    Attributes:
        flags: values by key, without those that were not given.
        file: the section of the configuration file, or empty.
        faults: of the file's form.
        prefix: of keys in messages: the section's name where there is a file.
        printing: whether the effective settings are wanted, and nothing else.
    """

    flags: dict[str, Any]
    file: Mapping[str, Setting]
    faults: tuple[str, ...]
    prefix: str
    printing: bool


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that every part has for its configuration."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings for all parts; flags win over it")
    parser.add_argument(PRINT_FLAG, action="store_true", help="print the settings with their origin as JSON, and end")


def split(section: str, namespace: argparse.Namespace) -> Given:
    """Takes the two flags of `add_flags` out of a command line and reads the section that they name."""
    flags = {key: value for key, value in vars(namespace).items() if key not in OWN}
    if namespace.config is None:
        return Given(flags, {}, (), "", namespace.print_config)
    document = read(namespace.config)
    return Given(flags, document.sections[section], document.faults, f"{section}.", namespace.print_config)


def converted(given: Given, convert: Mapping[str, Callable[[Any], Any]]) -> tuple[dict[str, Setting], list[str]]:
    """The file's values as the part takes them, with the faults of all.

    Args:
        convert: for each known key what makes the value, raising ValueError, TypeError or ArgumentTypeError.
    """
    values, faults = dict[str, Setting](), list(given.faults)
    for key, (value, origin) in given.file.items():
        if key not in convert:
            faults.append(f"{origin}: {given.prefix}{key}: {unknown(key, convert)}")
            continue
        try:
            values[key] = Setting(convert[key](value), origin)
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            faults.append(f"{origin}: {given.prefix}{key}: {error}")
    return values, faults


def build(
    make: Callable[[dict[str, Any]], _Made], given: Given, file: Mapping[str, Setting], faults: Sequence[str]
) -> tuple[_Made | None, list[str]]:
    """Makes the configuration, collecting what its own checks say until they are satisfied or repeat themselves.

    Args:
        make: from values by key; raises InvalidArgument, one field at a time.
        file: the file's values, from `converted`, with its faults.

    Returns:
        The configuration, or None where there are faults; and the faults.
    """
    flags = given.flags
    found, left = list(faults), {key: setting.value for key, setting in file.items()} | flags
    while True:
        try:
            made = make(left)
        except (InvalidArgument, OSError) as error:
            field = error.field if isinstance(error, InvalidArgument) else ""
            problem = error.problem if isinstance(error, InvalidArgument) else str(error)
            origin = f"{file[field].origin}: " if field in file and field not in flags else ""
            found.append(f"{origin}{given.prefix}{field}: {problem}" if field else problem)
            if field not in left:
                return None, found
            del left[field]  # and on with its default, to see what else is wrong
            continue
        except TypeError:  # what was taken out has no default
            if not found:
                raise
            return None, found
        return (None if found else made), found


def effective(defaults: Mapping[str, Any], file: Mapping[str, Setting], flags: Mapping[str, Any]) -> dict[str, Setting]:
    """Every setting with the origin of its value."""
    shown = {key: Setting(value, "default") for key, value in defaults.items()}
    return shown | dict(file) | {key: Setting(value, "flag") for key, value in flags.items()}


def print_and_exit(settings: Mapping[str, Setting], faults: Sequence[str]) -> None:
    """Writes them as JSON and ends the process: status 2 where there are faults."""
    shown = {key: {"value": value, "origin": origin} for key, (value, origin) in settings.items()}
    json.dump({"settings": shown, "faults": list(faults)}, sys.stdout, default=str)
    sys.stdout.write("\n")
    sys.stdout.flush()
    raise SystemExit(2 if faults else 0)


def complain(faults: Sequence[str]) -> None:
    """
    Raises:
        BadConfiguration: there are any.
    """
    if faults:
        raise BadConfiguration(faults)
