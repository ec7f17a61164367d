"""What a request body says about the form of the answer: OpenAI's `response_format`, and the fields of vLLM's API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from outrider.errors import InvalidArgument
from outrider.grammar import Grammar, GrammarKind

Schema = dict[str, Any] | bool
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
Regex = Annotated[str, Field(min_length=1)]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class JsonSchema(_Model):
    """OpenAI's wrapping of a schema; `strict` has no effect: every schema is kept strictly."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[Schema, Field(alias="schema")]


class ResponseFormat(_Model):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Model):
    """vLLM's `structured_outputs`; exactly one member is set."""

    json_: Annotated[str | Schema | None, Field(alias="json")] = None
    regex: Regex | None = None
    choice: Choices | None = None
    json_object: bool | None = None


class Structure(NamedTuple):
    """What an answer must match, and the field that says so."""

    grammar: Grammar
    field: str


def structure(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    guided_json: str | Schema | None,
    guided_regex: str | None,
    guided_choice: list[str] | None,
) -> Structure | None:
    """The one grammar that a body asks for, or None.

    Raises:
        InvalidArgument: it asks for several, or for none in a field that must name one.
    """
    found: list[Structure] = []

    def add(field: str, value: Any, build: Callable[[Any], Grammar]) -> None:
        if value is not None:
            try:
                found.append(Structure(build(value), field))
            except InvalidArgument as error:
                raise InvalidArgument(field, error.problem) from None

    if response_format is not None and response_format.type != "text":
        add("response_format", response_format, _of_format)
    add("guided_json", guided_json, _schema)
    add("guided_regex", guided_regex, _regex)
    add("guided_choice", guided_choice, _choice)
    if structured_outputs is not None:
        before = len(found)
        add("structured_outputs", structured_outputs.json_, _schema)
        add("structured_outputs", structured_outputs.regex, _regex)
        add("structured_outputs", structured_outputs.choice, _choice)
        add("structured_outputs", True if structured_outputs.json_object else None, lambda _: _OBJECT)
        if len(found) == before:
            raise InvalidArgument("structured_outputs", "must set one of json, regex, choice, json_object")
    if len(found) > 1:
        raise InvalidArgument(found[1].field, f"an answer has one form, and {found[0].field} sets it already")
    return found[0] if found else None


_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')


def _of_format(wanted: ResponseFormat) -> Grammar:
    if wanted.type == "json_object":
        return _OBJECT
    if wanted.json_schema is None:
        raise InvalidArgument("response_format", "of type json_schema needs json_schema")
    return _schema(wanted.json_schema.schema_)


def _schema(value: str | Schema) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))


def _regex(value: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, value)


def _choice(value: list[str]) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(value))
