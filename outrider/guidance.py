"""Grammars in the words of llguidance, the library that compiles and follows them. No torch, no tokenizer."""

from __future__ import annotations

import json
from functools import lru_cache

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
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise InvalidArgument("grammar", "must be a list of texts, none of them empty")
    # Lark writes its strings as JSON does.
    texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(value))
    return LLMatcher.grammar_from_lark(f"start: {texts}")


@lru_cache(_CHECKED)
def problem(grammar: Grammar) -> str | None:
    """Why a grammar cannot be followed, whatever the tokenizer: no schema, or one with unknown keywords. Else None."""
    try:
        return LLMatcher.validate_grammar(source(grammar)) or None
    except InvalidArgument as error:
        return error.problem
