"""Grammars in the words of llguidance, the library that compiles and follows them. No torch, no tokenizer."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from outrider.errors import InvalidArgument
from outrider.grammar import Grammar, GrammarKind

_CHECKED = 256


def source(grammar: Grammar) -> str:
    """The grammar as llguidance takes it.

    Raises:
        InvalidArgument: the text is not of its kind.
    """
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    try:
        value = json.loads(grammar.text)
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("grammar", f"is not valid JSON: {error}") from None
    if grammar.kind is GrammarKind.TOOL_CALLS:
        return _lark(_calls(value))
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise InvalidArgument("grammar", "must be a list of texts, none of them empty")
    # Lark writes its strings as JSON does.
    texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(value))
    return _lark(f"start: {texts}")


def _lark(text: str) -> str:
    try:
        return LLMatcher.grammar_from_lark(text)
    except UnicodeError:
        raise InvalidArgument("grammar", "holds half of a surrogate pair, which is no text") from None


def _calls(value: Any) -> str:
    """Lark for calls as Hermes and Qwen templates write them: a JSON object between tags on lines of their own."""
    functions = value.get("functions") if isinstance(value, dict) else None
    if not isinstance(functions, dict) or not functions:
        raise InvalidArgument("grammar", "must name the functions that may be called")
    rules = ["start: call" + (' ("\\n" call)*' if value.get("several") else "")]
    rules.append('call: "<tool_call>\\n{\\"name\\": " (%s) "}\\n</tool_call>"')
    for index, (name, arguments) in enumerate(functions.items()):
        before = json.dumps(f'{json.dumps(name, ensure_ascii=False)}, "arguments": ', ensure_ascii=False)
        # Each schema is a root of its own, so that its references to `#/$defs` mean what they say.
        rules.append(f"function_{index}: {before} %json {json.dumps(_of_object(name, arguments))}")
    rules[1] %= " | ".join(f"function_{index}" for index in range(len(functions)))
    return "\n".join(rules)


def _of_object(name: str, arguments: Any) -> Any:
    """The schema, which allows nothing but objects."""
    if arguments in (True, None):
        return {"type": "object"}
    if not isinstance(arguments, dict) or arguments.get("type", "object") != "object":
        raise InvalidArgument("grammar", f"the arguments of {name} must be an object")
    return {"type": "object", **arguments}


@lru_cache(_CHECKED)
def problem(grammar: Grammar) -> str | None:
    """Why a grammar cannot be followed, whatever the tokenizer: no schema, or one with unknown keywords. Else None."""
    try:
        return LLMatcher.validate_grammar(source(grammar)) or None
    except InvalidArgument as error:
        return error.problem
