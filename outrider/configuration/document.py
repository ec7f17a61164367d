"""A configuration file: sections of settings, each with the line that it stands on."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from outrider.errors import InvalidArgument

SECTIONS = ("target", "draft", "coordinator", "up")
_FIELD = re.compile(r"(?:^|\.| )([a-z]\w+): ")
_SECRET = re.compile(r"(^|_)(token|password|secret|api_key|passphrase)$")


class Setting(NamedTuple):
    """A value and where it comes from: "default", "flag", or FILE:LINE."""

    value: Any
    origin: str


class BadConfiguration(InvalidArgument):
    """A configuration with faults; the message lists them all.

    Attributes:
        faults: one line each.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        found = _FIELD.search(self.faults[0])
        super().__init__(found[1] if found else "config", self.faults[0])
        self.args = ("\n".join(self.faults),)


@dataclass(frozen=True, slots=True)
class Document:
    """What a file says, and what is wrong with its form.

    Attributes:
        sections: by name, settings by key; a section that the file lacks is empty.
        faults: one line each, with file and line.
    """

    sections: Mapping[str, Mapping[str, Setting]]
    faults: tuple[str, ...]


def read(path: str) -> Document:
    """Reads a file; whatever is wrong with it becomes a fault."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return Document({section: {} for section in SECTIONS}, (f"{path}: cannot be read ({error})",))
    return parse(text, path)


def parse(text: str, name: str) -> Document:
    """As `read`, from text; `name` is the file's, for messages."""
    sections: dict[str, Mapping[str, Setting]] = {section: {} for section in SECTIONS}
    faults: list[str] = []
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is not None and not isinstance(root, yaml.MappingNode):
            faults.append(f"{_at(name, root)}: must hold sections: {', '.join(SECTIONS)}")
        elif root is not None:
            for key, value in root.value:
                _section(loader, name, key, value, sections, faults)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        faults.append(f"{name}{line}: is no YAML ({getattr(error, 'problem', None) or error})")
    finally:
        loader.dispose()
    return Document(sections, tuple(faults))


def unknown(key: str, known: Iterable[str]) -> str:
    """What to say of a key that does not exist."""
    if close := difflib.get_close_matches(key.replace("-", "_"), known, 1):
        return f"there is no such setting; did you mean {close[0]}?"
    return "there is no such setting"


def _section(
    loader: yaml.SafeLoader,
    name: str,
    key: yaml.Node,
    node: yaml.Node,
    sections: dict[str, Mapping[str, Setting]],
    faults: list[str],
) -> None:
    title = str(key.value)
    if title not in SECTIONS:
        close = difflib.get_close_matches(title, SECTIONS, 1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(SECTIONS)}"
        faults.append(f"{_at(name, key)}: {title}: there is no such section{hint}")
        return
    if sections[title]:
        faults.append(f"{_at(name, key)}: {title}: the section stands in the file twice")
        return
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
        return
    if not isinstance(node, yaml.MappingNode):
        faults.append(f"{_at(name, node)}: {title}: must hold settings, one per line")
        return
    found: dict[str, Setting] = {}
    for entry, value in node.value:
        setting, where = str(entry.value), _at(name, entry)
        if setting in found:
            faults.append(f"{where}: {title}.{setting}: is set twice")
        elif _SECRET.search(setting):
            faults.append(f"{where}: {title}.{setting}: secrets come from files of their own or from the environment")
        else:
            found[setting] = Setting(loader.construct_object(value, deep=True), where)  # type: ignore[no-untyped-call]
    sections[title] = found


def _at(name: str, node: yaml.Node) -> str:
    return f"{name}:{node.start_mark.line + 1}"
