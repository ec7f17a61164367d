"""What a configuration file means to `outrider up`, which starts all parts: one file serves both ways of starting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from outrider.configuration.document import Document, unknown
from outrider.configuration.kinds import converter

_KEYS: Mapping[str, tuple[str, str, str]] = {
    "target": ("target", "model", "str"),
    "revision": ("target", "revision", "str | None"),
    "dtype": ("target", "dtype", "str"),
    "target_port": ("target", "port", "int"),
    "draft": ("draft", "model", "str"),
    "draft_revision": ("draft", "revision", "str | None"),
    "draft_dtype": ("draft", "dtype", "str"),
    "draft_port": ("draft", "port", "int"),
    "host": ("coordinator", "host", "str"),
    "port": ("coordinator", "port", "int"),
    "grpc_port": ("coordinator", "grpc_port", "int"),
    "served_model_name": ("coordinator", "served_model_name", "str"),
    "num_speculative_tokens": ("coordinator", "num_speculative_tokens", "str"),
    "rejection_sample_method": ("coordinator", "rejection_sample_method", "str"),
    "allow_vocab_mismatch": ("coordinator", "allow_vocab_mismatch", "bool"),
    "ssl_certfile": ("coordinator", "ssl_certfile", "str"),
    "ssl_keyfile": ("coordinator", "ssl_keyfile", "str"),
    "ssl_ca_certs": ("coordinator", "ssl_ca_certs", "str"),
    "link_ssl_certfile": ("coordinator", "link_ssl_certfile", "str"),
    "link_ssl_keyfile": ("coordinator", "link_ssl_keyfile", "str"),
    "link_ssl_ca_certs": ("coordinator", "link_ssl_ca_certs", "str"),
    "insecure": ("coordinator", "insecure", "bool"),
    "api_key_file": ("coordinator", "api_key_file", "str"),
    "target_device": ("up", "target_device", "str"),
    "draft_device": ("up", "draft_device", "str"),
    "start_timeout_s": ("up", "start_timeout_s", "float"),
}
"""Options of `up` by the place where the file has them, and their types."""

_PLACED = {
    "target": ("host", "device"),
    "draft": ("host", "device"),
    "coordinator": ("target", "draft"),
}
"""What `up` decides by itself: where the parts are."""


class Stack(NamedTuple):
    """
    Attributes:
        options: values for `StackOptions` by field.
        overruled: settings of the file that `up` decides by itself, as SECTION.KEY (FILE:LINE).
        faults: one line each.
    """

    options: dict[str, Any]
    overruled: list[str]
    faults: list[str]


def options(document: Document) -> Stack:
    """The options that a file gives."""
    found, faults = dict[str, Any](), list(document.faults)
    for name, (section, key, kind) in _KEYS.items():
        if setting := document.sections[section].get(key):
            try:
                found[name] = converter(kind)(setting.value)
            except ValueError as error:
                faults.append(f"{setting.origin}: {section}.{key}: {error}")
    known = [key for section, key, _ in _KEYS.values() if section == "up"]
    for key, setting in document.sections["up"].items():
        if key not in known:
            faults.append(f"{setting.origin}: up.{key}: {unknown(key, known)}")
    encrypted = "link_ssl_ca_certs" in document.sections["coordinator"]
    for part in ("target", "draft"):
        settings = document.sections[part]
        if settings and ("ssl_certfile" in settings) != encrypted:
            faults.append(
                f"{part}.ssl_certfile and coordinator.link_ssl_ca_certs go together: the links are encrypted or not"
            )
    overruled = [
        f"{section}.{key} ({document.sections[section][key].origin})"
        for section, keys in _PLACED.items()
        for key in keys
        if key in document.sections[section]
    ]
    return Stack(found, overruled, faults)
