"""The model that is served, as a request meets it: its name, limits, tokenizer, and what unset values mean."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from coordinator.tokenizer import Tokenizer
from outrider.errors import Mismatch, OutriderError, Status
from outrider.rpc.options import NOISE_VERSION, RULE_VERSION

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. Chat answers may fill the context."""
_NOT_OF_MODEL = ("presence_penalty", "frequency_penalty")
"""No `generation_config.json` has them."""
_WHOLE_NUMBERS = ("top_k", "max_new_tokens")


class UnknownModel(OutriderError):
    """The request names a model that is not served here."""

    status = Status.NOT_FOUND

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"the model {asked!r} does not exist; this server serves {served!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Sampling values of a request that does not set them: OpenAI's, or the model's own.

    A model's `generation_config.json` replaces those it names (vLLM's list of keys): temperature, top_p, top_k, min_p,
    repetition_penalty and, for chat answers, max_new_tokens. `do_sample` has no meaning here.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None

    @classmethod
    def of_model(cls, generation_config: Mapping[str, Any]) -> Defaults:
        """The defaults that a `generation_config.json` asks for."""
        given: dict[str, Any] = {}
        for field in fields(cls):
            value = None if field.name in _NOT_OF_MODEL else generation_config.get(field.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                given[field.name] = int(value) if field.name in _WHOLE_NUMBERS else float(value)
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the doors need to know.

    Attributes:
        name: by which clients call it.
        root: where its weights come from.
        eos_ids: ids that end an answer unless the request ignores them.
        max_model_len: positions of prompt and answer together.
        vocabulary: ids are below it.
        max_speculative_tokens: a request may ask for so many drafted tokens per round at most.
        fingerprint: changes whenever the same request might be answered differently.
        created: seconds since the epoch.
    """

    name: str
    root: str
    tokenizer: Tokenizer
    defaults: Defaults
    eos_ids: frozenset[int]
    max_model_len: int
    vocabulary: int
    max_speculative_tokens: int
    fingerprint: str
    created: int


def generation_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The parsed `generation_config.json`, or nothing.

    Raises:
        Mismatch: it is not JSON.
    """
    try:
        value = json.loads(files.get("generation_config.json", b"{}"))
    except ValueError as error:
        raise Mismatch(f"the target's generation_config.json is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def eos_ids(config: Mapping[str, Any], of_target: tuple[int, ...]) -> frozenset[int]:
    """End-of-sequence ids: the generation configuration's and the target's own."""
    value = config.get("eos_token_id")
    listed = value if isinstance(value, list) else [value]
    return frozenset(of_target) | {token for token in listed if isinstance(token, int)}


def fingerprint(*, model: str, revision: str, weight_hash: str, arithmetic: str) -> str:
    """`system_fingerprint`: one value per model, arithmetic (number format, compiled or not) and law of the noise."""
    parts = (model, revision, weight_hash, arithmetic, str(RULE_VERSION), str(NOISE_VERSION))
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
