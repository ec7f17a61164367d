"""Log-probabilities as OpenAI writes them: one object for completions, one entry per token for chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.token_bytes import TokenBytes
from outrider.logprobs import LogprobRows

LEAST = -9999.0
"""What stands for minus infinity, which JSON cannot write; OpenAI's own number for it."""


class LogprobWriter:
    """Writes the log-probabilities of one request.

    Args:
        texts: what each id writes.
        as_ids: whether tokens are named `token_id:N`, for texts that two of them share.
    """

    def __init__(self, texts: TokenBytes, *, as_ids: bool) -> None:
        self._texts = texts
        self._as_ids = as_ids

    def completion(self, tokens: Sequence[int], rows: LogprobRows, starts: Sequence[int]) -> dict[str, Any]:
        """Columns over tokens; the most probable ids by text, the token's own always among them."""
        own = [_number(value) for value in rows.own.tolist()]
        names = [self._name(token) for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": own,
            "top_logprobs": [
                {**self._tops(ids, values), name: value}
                for ids, values, name, value in zip(rows.top_ids.tolist(), rows.top.tolist(), names, own, strict=True)
            ],
            "text_offset": list(starts),
        }

    def completion_prompt(self, tokens: Sequence[int], rows: LogprobRows, starts: Sequence[int]) -> dict[str, Any]:
        """The same for a prompt, whose first token has none: nothing stands before it."""
        rest = self.completion(tokens[1:], rows, starts[1:])
        return {
            "tokens": [self._name(tokens[0]), *rest["tokens"]],
            "token_logprobs": [None, *rest["token_logprobs"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
            "text_offset": list(starts),
        }

    def chat(self, tokens: Sequence[int], rows: LogprobRows) -> dict[str, Any]:
        """An entry per token, with exactly the most probable ids that were asked for."""
        entries = []
        for token, value, ids, tops in zip(
            tokens, rows.own.tolist(), rows.top_ids.tolist(), rows.top.tolist(), strict=True
        ):
            alternatives = [self._entry(other, top) for other, top in zip(ids, tops, strict=True)]
            entries.append({**self._entry(token, value), "top_logprobs": alternatives})
        return {"content": entries, "refusal": None}

    def prompt(self, tokens: Sequence[int], rows: LogprobRows) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: by token the most probable ids and its own, None for the first token."""
        entries: list[dict[str, Any] | None] = [None]
        for token, value, ids, tops in zip(
            tokens[1:], rows.own.tolist(), rows.top_ids.tolist(), rows.top.tolist(), strict=True
        ):
            shown = {
                str(other): self._ranked(other, top, rank)
                for rank, (other, top) in enumerate(zip(ids, tops, strict=True), 1)
            }
            entries.append({str(token): self._ranked(token, value, None), **shown})
        return entries

    def _ranked(self, token: int, value: float, rank: int | None) -> dict[str, Any]:
        """`rank` is None for a token that is not among the most probable ones."""
        return {"logprob": _number(value), "rank": rank, "decoded_token": self._texts.text(token)}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": _number(value), "bytes": list(self._texts[token])}

    def _tops(self, ids: Sequence[int], values: Sequence[float]) -> dict[str, float]:
        """By text; of two tokens with one text the more probable one."""
        tops: dict[str, float] = {}
        for token, value in zip(ids, values, strict=True):
            tops.setdefault(self._name(token), _number(value))
        return tops

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._texts.text(token)


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Objects of consecutive tokens as one."""
    return {
        name: None if parts[0][name] is None else [entry for part in parts for entry in part[name]] for name in parts[0]
    }


def _number(value: float) -> float:
    return value if value > LEAST else LEAST
