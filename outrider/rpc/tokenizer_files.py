"""GetTokenizer: the files that turn text into ids, streamed in pieces from the model's folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from outrider.dummy import LOAD_FORMAT
from outrider.errors import ModelUnavailable
from outrider.models import STUB_PREFIX
from outrider.v1 import common_pb2

Piece = common_pb2.GetTokenizerResponse

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "config.json",
)
BYTE_TOKENIZER = "stub:bytes"
"""Stands for the built-in tokenizer of the stub models; there is no file behind it."""

_PIECE_BYTES = 1 << 20


def folder_of(model: str, load_format: str) -> Path | None:
    """Where a model's tokenizer lies; None for the byte tokenizer, of stubs and of random weights that bring none."""
    if model.startswith(STUB_PREFIX) or (load_format == LOAD_FORMAT and not (Path(model) / FILES[0]).is_file()):
        return None
    return Path(model)


async def pieces(folder: Path | None) -> AsyncIterator[Piece]:
    """The answer to GetTokenizer.

    Args:
        folder: of the model; None for a stub, whose tokenizer is built in.

    Raises:
        ModelUnavailable: the folder holds no tokenizer.json.
    """
    if folder is None:
        yield Piece(file_name=BYTE_TOKENIZER)
        return
    if not (folder / FILES[0]).is_file():
        raise ModelUnavailable(f"{folder} holds no {FILES[0]}")
    for name in FILES:
        path = folder / name
        if not path.is_file():
            continue
        data = path.read_bytes()
        for start in range(0, max(len(data), 1), _PIECE_BYTES):
            yield Piece(file_name=name, data=data[start : start + _PIECE_BYTES])
