"""Answers as OpenAI writes them: one JSON object, or a stream of chunks."""

from __future__ import annotations

import json
import time
from typing import Any

from coordinator.answer import Answer, Piece, Usage
from coordinator.fields import Door
from coordinator.logprob_objects import LogprobWriter, joined
from coordinator.openai import Shape
from coordinator.request import StreamStats
from coordinator.served import ServedModel
from coordinator.tool_calls import ToolCallReader, writes_calls
from outrider.sampling import Rule

DONE = b"data: [DONE]\n\n"

_compact = json.JSONEncoder(separators=(",", ":")).encode
"""`json.dumps` would make an encoder anew for every event."""


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _compact(value).encode() + b"\n\n"


class Writer:
    """Writes the answer to one request."""

    def __init__(self, shape: Shape, model: ServedModel, answer: Answer, request_id: str) -> None:
        self._shape = shape
        self._answer = answer
        self._chat = shape.door is Door.CHAT
        self._begun: set[int] = set()
        self._reads_calls = shape.reads_calls and writes_calls(model.tokenizer.template)
        self._readers: dict[int, ToolCallReader] = {}
        self._logprobs = LogprobWriter(model.tokenizer.bytes, as_ids=shape.tokens_as_ids)
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + request_id,
            "object": kind + ".chunk" if self._chat and shape.stream else kind,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }
        # Every event of a stream begins with the same fields, which are written once.
        self._opening = b"data: " + _compact(self._head)[:-1].encode() + b","

    def chunk(self, piece: Piece) -> bytes | None:
        """The event of one piece: all tokens of a round at once. None if there is nothing to say yet."""
        shape, first = self._shape, piece.choice not in self._begun
        echo = self._answer.echo(piece.choice) if first else None
        text = piece.text if echo is None else echo.text + piece.text
        delta, finish_reason = self._message(piece.choice, text, piece.finish_reason)
        said = delta.get("content") or delta.get("tool_calls")
        if not (said or piece.finish_reason or shape.return_token_ids or shape.logprobs is not None):
            return None
        self._begun.add(piece.choice)
        choice: dict[str, Any] = {"index": piece.choice}
        if self._chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = {**role, **delta}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs_of([piece], is_first=first)
        choice |= {"finish_reason": finish_reason, "stop_reason": piece.stop_reason}
        if shape.return_token_ids:
            choice |= {"token_ids": piece.token_ids, "drafted": piece.drafted}
            if first:
                choice["prompt_token_ids"] = self._answer.prompt_ids(piece.choice)
        frame: dict[str, Any] = {"choices": [choice]}
        if shape.continuous_usage:
            frame["usage"] = _usage(self._answer.usage)
        elif shape.include_usage:
            frame["usage"] = None
        return self._event(frame)

    def usage_chunk(self) -> bytes | None:
        """The last event before the end, if the client asked for it."""
        if not (self._shape.include_usage or self._shape.continuous_usage):
            return None
        return self._event({"choices": [], **self._counts()})

    def _event(self, fields: dict[str, Any]) -> bytes:
        return self._opening + _compact(fields)[1:].encode() + b"\n\n"

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """The answer as one object."""
        choices = []
        body: dict[str, Any] = {}
        by_choice: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_choice.setdefault(piece.choice, []).append(piece)
        for index, own in sorted(by_choice.items()):
            echo = self._answer.echo(index)
            text = ("" if echo is None else echo.text) + "".join(piece.text for piece in own)
            choice: dict[str, Any] = {"index": index}
            message, finish_reason = self._message(index, text, own[-1].finish_reason)
            if self._chat:
                choice["message"] = {"role": "assistant", "content": None, "refusal": None, **message}
            else:
                choice["text"] = text
            choice |= {
                "logprobs": self._logprobs_of(own, is_first=True),
                "finish_reason": finish_reason,
                "stop_reason": own[-1].stop_reason,
            }
            if self._shape.return_token_ids:
                choice["token_ids"] = [token for piece in own for token in piece.token_ids]
                choice["drafted"] = [drafted for piece in own for drafted in piece.drafted]
                choice["prompt_token_ids"] = self._answer.prompt_ids(index)
            # A chat has one prompt, and one list for all its choices.
            wanted = None if "prompt_logprobs" in body else self._shape.prompt_logprobs
            if wanted is not None and own[0].prompt_logprobs is not None:
                shown = own[0].prompt_logprobs.first(wanted)
                (body if self._chat else choice)["prompt_logprobs"] = self._logprobs.prompt(
                    self._answer.prompt_ids(index), shown
                )
            choices.append(choice)
        return {**self._head, "choices": choices, **body, **self._counts()}

    def _message(self, choice: int, text: str, finish_reason: str | None) -> tuple[dict[str, Any], str | None]:
        """What further text of a choice says, tool calls apart if there may be any, and why the choice ended."""
        if not self._reads_calls:
            return {"content": text}, finish_reason
        reader = self._readers.setdefault(choice, ToolCallReader())
        parsed = reader.feed(text, last=finish_reason is not None)
        if reader.calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        said: dict[str, Any] = {}
        if parsed.content or not (parsed.calls or reader.calls):
            said["content"] = parsed.content
        if parsed.calls:
            said["tool_calls"] = parsed.calls
        return said, finish_reason

    def _logprobs_of(self, pieces: list[Piece], *, is_first: bool) -> dict[str, Any] | None:
        """Of consecutive pieces of one choice; behind an echo also those of the prompt."""
        wanted = self._shape.logprobs
        if wanted is None:
            return None
        choice = pieces[0].choice
        echo = self._answer.echo(choice)
        offset = 0 if echo is None else len(echo.text)
        parts = []
        if is_first and echo is not None and pieces[0].prompt_logprobs is not None:
            rows = pieces[0].prompt_logprobs.first(wanted)
            parts.append(self._logprobs.completion_prompt(self._answer.prompt_ids(choice), rows, echo.starts))
        for piece in pieces:
            if piece.logprobs is None:
                continue
            if self._chat:
                parts.append(self._logprobs.chat(piece.token_ids, piece.logprobs))
            else:
                starts = [offset + start for start in piece.text_starts]
                parts.append(self._logprobs.completion(piece.token_ids, piece.logprobs, starts))
        return joined(parts) if parts else None

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
        "rule": "synthetic" if stats.synthetic else "coupled" if stats.rule is Rule.COUPLED else "standard",
    }


def _usage(usage: Usage) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}} if usage.cached_tokens else {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **details,
    }
