"""Answers as OpenAI writes them: one JSON object, or a stream of chunks."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from coordinator.answer import Answer, Piece, Usage
from coordinator.fields import Door
from coordinator.openai import Shape
from coordinator.request import StreamStats
from coordinator.served import ServedModel
from outrider.sampling import Rule

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class Writer:
    """Writes the answer to one request."""

    def __init__(self, shape: Shape, model: ServedModel, answer: Answer) -> None:
        self._shape = shape
        self._answer = answer
        self._chat = shape.door is Door.CHAT
        self._begun: set[int] = set()
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex,
            "object": kind + ".chunk" if self._chat and shape.stream else kind,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    def chunk(self, piece: Piece) -> bytes | None:
        """The event of one piece: all tokens of a round at once. None if there is nothing to say yet."""
        first = piece.choice not in self._begun
        says_something = piece.text or piece.finish_reason or self._shape.return_token_ids
        if not says_something:
            return None
        self._begun.add(piece.choice)
        choice: dict[str, Any] = {"index": piece.choice}
        if self._chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = {**role, "content": piece.text}
        else:
            choice["text"] = piece.text
        choice |= {"logprobs": None, "finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        if self._shape.return_token_ids:
            choice |= {"token_ids": piece.token_ids, "drafted": piece.drafted}
            if first:
                choice["prompt_token_ids"] = self._answer.prompt_ids
        frame: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._shape.continuous_usage:
            frame["usage"] = _usage(self._answer.usage)
        elif self._shape.include_usage:
            frame["usage"] = None
        return event(frame)

    def usage_chunk(self) -> bytes | None:
        """The last event before the end, if the client asked for it."""
        if not (self._shape.include_usage or self._shape.continuous_usage):
            return None
        return event({**self._head, "choices": [], **self._counts()})

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """The answer as one object."""
        choices = []
        for index in sorted({piece.choice for piece in pieces}):
            own = [piece for piece in pieces if piece.choice == index]
            text = "".join(piece.text for piece in own)
            choice: dict[str, Any] = {"index": index}
            if self._chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choice |= {
                "logprobs": None,
                "finish_reason": own[-1].finish_reason,
                "stop_reason": own[-1].stop_reason,
            }
            if self._shape.return_token_ids:
                choice["token_ids"] = [token for piece in own for token in piece.token_ids]
                choice["drafted"] = [drafted for piece in own for drafted in piece.drafted]
                choice["prompt_token_ids"] = self._answer.prompt_ids
            choices.append(choice)
        return {**self._head, "choices": choices, **self._counts()}

    def _counts(self) -> dict[str, Any]:
        metrics = {"speculative_decoding": speculation(self._answer.speculation)}
        return {"usage": _usage(self._answer.usage), "metrics": metrics}


def speculation(stats: StreamStats) -> dict[str, Any]:
    """The object `metrics.speculative_decoding`: vLLM's, and the rule that ran.

    Mean acceptance length = 1 + accepted / rounds with a draft; draft acceptance rate = accepted / drafted. Both are 0
    where nothing was drafted.
    """
    steps, drafted, accepted = stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": stats.acceptance_histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "rule": "coupled" if stats.rule is Rule.COUPLED else "standard",
    }


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
