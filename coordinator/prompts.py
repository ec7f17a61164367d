"""Prompts as token ids, and as the text that an echo repeats. Runs on a worker thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from coordinator.query import Conversation, Prompt, Query
from coordinator.served import ServedModel
from outrider.errors import InvalidArgument

_MUST_BE_READ = ("tools", "documents", "reasoning_effort")


class Echo(NamedTuple):
    """A prompt as an answer repeats it.

    Attributes:
        text: as it was given, or what its ids say.
        starts: where the text of each token begins.
    """

    text: str
    starts: tuple[int, ...]


def prompt_ids(prompt: Prompt, query: Query, model: ServedModel) -> tuple[int, ...]:
    """The ids of one of a query's prompts.

    Raises:
        InvalidArgument: it is empty, no text, holds unknown ids, or leaves no room for an answer.
    """
    field = query.prompt_field
    if isinstance(prompt, tuple):
        check_ids(field, prompt, model)
        ids = prompt
    else:
        try:
            ids = tuple(_encode(prompt, query, model))
        except UnicodeError:
            raise InvalidArgument(field, "holds half of a surrogate pair, which is no text") from None
    if not ids:
        raise InvalidArgument(field, "is empty")
    kept = query.truncate_prompt_tokens
    if kept is not None:
        ids = ids[-(kept if kept > 0 else max(model.max_model_len - max(query.sampling.max_tokens or 1, 1), 1)) :]
    if len(ids) >= model.max_model_len:
        raise InvalidArgument(
            field, f"has {len(ids)} tokens; at most {model.max_model_len - 1} leave room for an answer"
        )
    return ids


def echo(prompt: Prompt, ids: tuple[int, ...], query: Query, model: ServedModel) -> Echo:
    """What an answer repeats of a prompt of these ids."""
    detokenizer = model.tokenizer.detokenizer((), skip_special_tokens=query.skip_special_tokens)
    pieces, starts, length = [], [], 0
    for token in ids:
        starts.append(length)
        pieces.append(detokenizer.push(token))
        length += len(pieces[-1])
    text = "".join(pieces) + detokenizer.flush()
    if isinstance(prompt, str) and query.truncate_prompt_tokens is None:
        text = prompt  # tokenizers may normalise, or drop spaces
    return Echo(text, tuple(min(start, len(text)) for start in starts))


def check_ids(field: str, ids: Iterable[int], model: ServedModel) -> None:
    """
    Raises:
        InvalidArgument: one of them is no id of the vocabulary.
    """
    for token in ids:
        if not 0 <= token < model.vocabulary:
            raise InvalidArgument(field, f"id {token} is out of range; the vocabulary has {model.vocabulary} ids")


def _encode(prompt: str | Conversation, query: Query, model: ServedModel) -> list[int]:
    adds = query.add_special_tokens
    if isinstance(prompt, Conversation):
        return model.tokenizer.encode_chat(
            prompt.messages,
            template=prompt.template,
            add_special_tokens=bool(adds),
            must_read=[name for name in _MUST_BE_READ if name in prompt.variables],
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            variables=prompt.variables,
        )
    return model.tokenizer.encode(prompt, add_special_tokens=adds is not False) if prompt else []
