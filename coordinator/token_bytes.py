"""What each id writes, in bytes: the pieces that log-probabilities name, which need not be whole characters."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class TokenBytes:
    """The bytes of single ids, by the conventions of the tokenizer's decoder.

    Byte-level decoders write each byte as a printable character; those that come from sentencepiece write a space as
    U+2581 and bytes as `<0xE2>`. Added tokens stand for their own text.

    Attributes:
        single: ids that stand for one byte, of decoders that join such bytes to characters.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        kinds = json.dumps(state, ensure_ascii=False)
        self._bytes_by_character = (
            {character: byte for byte, character in enumerate(byte_characters())} if '"ByteLevel"' in kinds else {}
        )
        self._has_byte_tokens = '"ByteFallback"' in kinds
        ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256 if self._has_byte_tokens else 0))
        self.single = frozenset(token_id for token_id in ids if token_id is not None)
        self._has_spaces = '"Metaspace"' in kinds or _SPACE in kinds

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of an id; none for padding."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes_by_character:
            known = [self._bytes_by_character.get(character) for character in token]
            if None not in known:
                return bytes(byte for byte in known if byte is not None)
        byte = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        return (token.replace(_SPACE, " ") if self._has_spaces else token).encode("utf-8", "replace")

    def text(self, token_id: int) -> str:
        """The bytes as text, as OpenAI writes them: where they are no whole characters, `bytes:` and escapes."""
        data = self[token_id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte (GPT-2's mapping)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
