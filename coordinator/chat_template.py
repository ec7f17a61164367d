"""A model's own chat template, rendered as transformers renders it.

Templates come from model repositories, so they are untrusted programs: they run in jinja2's immutable sandbox, without
access to Python's internals through `dict` or `namespace`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import InvalidArgument

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template.

    Attributes:
        source: its text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` (`bos_token`, ...) are the template's variables.

        Raises:
            InvalidArgument: the source is no template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
        )
        self._special_tokens = dict(special_tokens)
        self.source = source
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidArgument("chat_template", f"cannot be compiled: {error}") from None

    def reads(self, name: str) -> bool:
        """Whether the template looks at a variable; one that it does not look at would be lost in silence."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens written out.

        Raises:
            InvalidArgument: the template rejects the conversation, or fails on it.
        """
        names: dict[str, Any] = {**self._special_tokens, "tools": None, "documents": None, **(variables or {})}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(**names)
        except RecursionError:
            raise InvalidArgument("messages", "are nested too deeply for the chat template") from None
        except Exception as error:  # the template is a foreign program: whatever it raises is about its input
            raise InvalidArgument("messages", f"do not fit the model's chat template: {error}") from None
        return _cut_behind(text, messages[-1]) if continue_final_message else text


def _cut_behind(text: str, message: Message) -> str:
    """The text up to the end of the final message's content, so that the answer goes on from there."""
    content = str(message.get("content") or "").strip()
    end = text.rfind(content)
    if not content or end < 0:
        raise InvalidArgument("continue_final_message", "the chat template does not show the final message as it is")
    return text[: end + len(content)]


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only lets its body through."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict(...)` without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` that stores no private attribute."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # jinja2's own signature, so that `namespace(self=...)` works
        itself, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(itself, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)  # local time, as the templates' authors expect


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
