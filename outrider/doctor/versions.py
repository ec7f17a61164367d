"""Installed versions against those that this release is tested with."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import NamedTuple

from outrider.doctor.finding import Finding, ok, problem, warning


class Tested(NamedTuple):
    """A package of the tested matrix.

    Attributes:
        least: the oldest version that Outrider may be installed with.
        tested: the version that this release is tested with.
        extra: the extra that brings it, "" where every part needs it.
    """

    package: str
    least: str
    tested: str
    extra: str


MATRIX = (
    Tested("grpcio", "1.85", "1.85.3", ""),
    Tested("protobuf", "6.33", "7.36.2", ""),
    Tested("numpy", "2.0", "2.4.6", ""),
    Tested("tokenizers", "0.22", "0.23.3", ""),
    Tested("torch", "2.13", "2.13.0", "services"),
    Tested("transformers", "5.0", "5.24.0", "services"),
    Tested("safetensors", "0.6", "0.8.0", "services"),
    Tested("ray", "2.50", "2.60.0", "coordinator"),
    Tested("fastapi", "0.133", "0.165.0", "coordinator"),
    Tested("uvicorn", "0.34", "0.54.0", "coordinator"),
)
"""`least` is pyproject.toml's, `tested` constraints.txt's; a test holds them equal."""

PYTHON_LEAST, PYTHON_TESTED = (3, 11), ((3, 11), (3, 12))


def installed(package: str) -> str | None:
    """The version of a distribution, without importing it; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python(version: tuple[int, int]) -> Finding:
    """The interpreter."""
    text = ".".join(map(str, version))
    if version < PYTHON_LEAST:
        return problem("python", f"{text}, at least 3.11 is needed", "make the environment with Python 3.11 or 3.12")
    if version not in PYTHON_TESTED:
        return warning("python", f"{text}, tested with 3.11 and 3.12", "if something fails, try it with Python 3.12")
    return ok("python", text)


def check_versions(
    matrix: Sequence[Tested] = MATRIX, installed: Callable[[str], str | None] = installed
) -> list[Finding]:
    """One finding per package. A part that is missing may be another machine's, so that alone is a warning."""
    return [_check(row, installed(row.package)) for row in matrix]


def _check(row: Tested, found: str | None) -> Finding:
    extra = f"outrider[{row.extra}]" if row.extra else "outrider"
    install = f"pip install -c constraints.txt {extra}"
    if found is None:
        state = f"not installed ({row.extra} only)" if row.extra else "not installed"
        return (warning if row.extra else problem)(row.package, state, install)
    if numbers(found) < numbers(row.least):
        return problem(row.package, f"{found}, at least {row.least} is needed", install)
    if numbers(found)[:2] != numbers(row.tested)[:2]:
        return warning(row.package, f"{found}, tested with {row.tested}", f"if something fails: {install}")
    return ok(row.package, f"{found}, tested with {row.tested}")


def numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version: "2.13.0+cu130" is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
