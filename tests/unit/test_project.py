"""What the packaging promises."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)

UNTRIED = ("awq", "gptq", "fp8")
"""Extras that docs/models.md calls untried: no version of theirs has been tested."""


def closure(requirements: Iterable[str]) -> set[str]:
    """Every distribution that installing `requirements` brings here, by walking installed metadata."""
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in found:
                continue
            found.add((name, extra))
            try:
                children = [Requirement(text) for text in requires(name) or ()]
            except PackageNotFoundError:
                continue
            waiting += [c for c in children if c.marker is None or c.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def test_the_coordinator_installs_without_torch() -> None:
    """Guards against a coordinator image that carries gigabytes it never imports."""
    brought = closure([*PROJECT["dependencies"], *EXTRAS["coordinator"]])
    assert "ray" in brought
    assert not brought & {"torch", "transformers", "accelerate", "safetensors"}


def test_services_install_without_ray() -> None:
    """Guards against model images that carry the coordinator's stack."""
    brought = closure([*PROJECT["dependencies"], *EXTRAS["services"]])
    assert "torch" in brought and "ray" not in brought


def test_every_dependency_is_pinned_in_the_constraints() -> None:
    """Guards against a fresh clone that installs versions nobody tested."""
    left_out = {"all", *UNTRIED}
    groups = [PROJECT["dependencies"], *(group for name, group in EXTRAS.items() if name not in left_out)]
    named = {canonicalize_name(Requirement(text).name) for group in groups for text in group}
    assert named <= PINS.keys()
    outside = [text for group in groups for text in group if not Requirement(text).specifier.contains(PINS[key(text)])]
    assert not outside


def key(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def test_the_constraints_serve_every_build_of_torch() -> None:
    """Guards against a local label (+cpu, +cu130) that makes the file useless elsewhere."""
    assert PINS["torch"] == "2.13.0"
    assert not [pin for pin in PINS.values() if "+" in pin]


def test_make_targets_that_documents_name_exist() -> None:
    """Guards against a README whose commands do not work."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        named = set(
            re.findall(r"`?\bmake ([a-z][a-z-]*)`?(?:$|`|\s{2,}|\s+#)", (ROOT / document).read_text(), re.MULTILINE)
        )
        assert named, document
        assert named <= targets, document
    assert {"demo", "test", "test-model", "check", "proto", "bench", "up", "down"} <= targets


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_links_between_documents_lead_somewhere(document: str) -> None:
    """Guards against dead links to files of this repository."""
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / document).read_text())
    assert not [link for link in links if not (ROOT / link).exists()]
