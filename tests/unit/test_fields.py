"""The table of request fields: what is honoured, has no effect, is refused, or is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.bodies import ChatCompletionRequest, CompletionRequest
from coordinator.fields import FIELDS, Door, Treatment, split
from outrider.errors import InvalidArgument

REFUSED = sorted(name for name, field in FIELDS.items() if field.treatment is Treatment.REFUSED)


def test_the_models_take_exactly_the_honoured_fields() -> None:
    """Guards against a field that the table promises and no model reads, or the reverse."""
    for door, model in ((Door.COMPLETIONS, CompletionRequest), (Door.CHAT, ChatCompletionRequest)):
        honoured = {
            name for name, field in FIELDS.items() if field.treatment is Treatment.HONOURED and door in field.doors
        }
        assert honoured == set(model.model_fields)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_answer_and_is_not_built_is_refused(name: str) -> None:
    """Guards against parameters that are dropped in silence."""
    door = FIELDS[name].doors[0]
    with pytest.raises(InvalidArgument) as error:
        split({name: {"something": "else"}}, door)
    assert error.value.field == name


@pytest.mark.parametrize("name", REFUSED)
def test_refused_fields_are_accepted_where_they_ask_for_nothing(name: str) -> None:
    """Guards clients that send every field they know with its default."""
    door = FIELDS[name].doors[0]
    for value in (None, *FIELDS[name].harmless):
        assert split({name: value}, door) == ({}, ())


@pytest.mark.parametrize(("name", "value"), [("use_beam_search", 0), ("length_penalty", True)])
def test_a_harmless_value_of_another_type_is_not_harmless(name: str, value: Any) -> None:
    """Guards against Python's `True == 1`."""
    with pytest.raises(InvalidArgument):
        split({name: value}, Door.COMPLETIONS)


def test_fields_without_effect_and_nulls_disappear() -> None:
    """Guards against a 400 for fields that only inform the operator."""
    assert split({"user": "me", "metadata": {"a": 1}, "temperature": None}, Door.CHAT) == ({}, ())


def test_unknown_fields_are_named_or_refused() -> None:
    """Guards against typing errors that nobody notices."""
    assert split({"temprature": 1, "n": 2}, Door.CHAT) == ({"n": 2}, ("temprature",))
    with pytest.raises(InvalidArgument) as error:
        split({"temprature": 1}, Door.CHAT, strict=True)
    assert error.value.field == "temprature"


def test_a_field_of_the_other_endpoint_is_unknown() -> None:
    """Guards against `messages` sent to completions being taken for an answerable request."""
    assert split({"messages": []}, Door.COMPLETIONS).ignored == ("messages",)


def test_the_documentation_lists_every_field() -> None:
    """Guards the table in the docs against fields that came later."""
    text = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text("utf-8")
    assert [name for name in FIELDS if f"`{name}`" not in text] == []
